"""Text to tokens and back: tokenizers, chat templates, whole characters, stop strings."""

from __future__ import annotations

import codecs
import copy
import json
import logging
import secrets
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..models import tokenizer_folder

log = logging.getLogger("serve")

Messages = Sequence[Mapping[str, Any]]
Functions = Sequence[Mapping[str, Any]]
"""Tools, as templates take them."""


class Decoder(Protocol):
    """Turns a request's tokens into text, as they come."""

    def step(self, token: int) -> str:
        """The characters that are whole with this token; empty if there are none."""

    def rest(self) -> str:
        """The rest of the text, at the end: U+FFFD for a character that is not whole."""


class Text(Protocol):
    """The text side of a model, which the front needs besides the engine."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, with those that mark its ends, if the tokenizer adds any."""

    def encode_cut(self, text: str, special: bool, most: int | None) -> list[int]:
        """The same, cut to `most` tokens: those that mark the ends stay."""

    def encode_pair(self, one: str, other: str, most: int | None) -> tuple[list[int], int]:
        """The tokens of a pair of texts, and where the second begins by its type; 0: nowhere.

        Args:
            most: tokens to which the pair is cut, the longer text first; None: all are there.
        """

    def encode_chat(
        self,
        messages: Messages,
        options: Mapping[str, Any] | None = None,
        tools: Functions = (),
    ) -> list[int]:
        """The tokens of a chat.

        Args:
            messages: as `tools.messages` reads them.
            options: for its template.
            tools: that the model is shown.

        Raises:
            ValueError: the template refuses them.
        """

    @property
    def template(self) -> str:
        """The chat template; empty if there is none."""

    def special(self, text: str) -> int | None:
        """The number of a special token; None if the text is none."""

    def ending(self, tokens: Sequence[int]) -> str:
        """The text of the last tokens of a prompt, with names of special tokens."""

    def stored(self) -> str | None:
        """The tokenizer as the library tokenizers writes it; None: its tokens are bytes."""

    def decode(self, tokens: Sequence[int]) -> str: ...
    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for: maybe a part of a character."""

    def decoder(
        self, prompt: Sequence[int] = (), special: bool = False, kept: Sequence[str] = ()
    ) -> Decoder:
        """A decoder for tokens that continue `prompt`, or begin a text if it is empty.

        Args:
            special: whether the text has special tokens.
            kept: names of those that it has in any case.
        """


class Bytes:
    """The text of a model whose vocabulary is the 256 bytes; a chat has a line a message."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_cut(self, text: str, special: bool, most: int | None) -> list[int]:
        return list(text.encode()[:most])

    def encode_pair(self, one: str, other: str, most: int | None) -> tuple[list[int], int]:
        return list((one + other).encode()[:most]), 0

    def encode_chat(
        self,
        messages: Messages,
        options: Mapping[str, Any] | None = None,
        tools: Functions = (),
    ) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    @property
    def template(self) -> str:
        return ""

    def special(self, text: str) -> None:
        return None

    def ending(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens[-ENDING:])

    def stored(self) -> None:
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token & 255 for token in tokens).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token & 255])

    def decoder(
        self, prompt: Sequence[int] = (), special: bool = False, kept: Sequence[str] = ()
    ) -> Decoder:
        return _BytesDecoder()


class _BytesDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        return self._utf8.decode(bytes([token & 255]))

    def rest(self) -> str:
        return self._utf8.decode(b"", final=True)


class HuggingFace:
    """The text of a folder with `tokenizer.json`, and a chat template if the model has one.

    Args:
        chats: whether there may be chats.

    Raises:
        FileNotFoundError: there is no tokenizer in the folder.
        ValueError: it has tokens that the model's embedding has no row for.
    """

    def __init__(self, folder: Path, chats: bool = True) -> None:
        file = folder / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"there is no {file}: is the folder one of a model?")
        from transformers import PreTrainedTokenizerFast  # whose import takes long, without torch

        # This class, and not one that a configuration may name: the files alone decide.
        self._files = PreTrainedTokenizerFast.from_pretrained(folder)
        self._tokenizer = self._files.backend_tokenizer
        # Files set these for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._check_rows(folder)
        # A second tokenizer, which reads the names of special tokens as text.
        self._plain = copy.deepcopy(self._tokenizer)
        self._plain.encode_special_tokens = True
        self._specials = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special and token.content
        ]
        self._numbers = frozenset(
            number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        if chats and self._files.chat_template is None:
            log.warning("%s has no chat template: a chat is its messages, a line each", folder)
        self._has_bytes = '"ByteLevel"' in json.dumps(_read(file).get("decoder"))

    def _check_rows(self, folder: Path) -> None:
        """Refuse a tokenizer that has outgrown its model, as by tokens that were added.

        Any client may write the name of any token in a prompt. So all tokens count, and not only
        those of templates and of known texts.
        """
        config = _read(folder / "config.json")
        rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        token = max(vocabulary, key=vocabulary.__getitem__)
        highest = vocabulary[token]
        if not isinstance(rows, int) or highest < rows:
            return
        (factory,) = (config.get("architectures") or ["AutoModelForCausalLM"])[:1]
        raise ValueError(
            f"the tokenizer of {folder} has {len(vocabulary)} tokens, added ones included, up to "
            f"id {highest} ({token!r}), and the model's embedding has {rows} rows: a client that "
            "writes such a token would ask for a row that is not there. Give the model a row for "
            "each, and save it into its folder again:\n"
            '  python -c "import transformers; '
            f"model = transformers.{factory}.from_pretrained('{folder}'); "
            f"model.resize_token_embeddings({highest + 1}); model.save_pretrained('{folder}')\""
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_cut(self, text: str, special: bool, most: int | None) -> list[int]:
        if most is None:
            return self.encode(text, special)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ends = self._tokenizer.num_special_tokens_to_add(False) if special else 0
        encoding.truncate(max(0, most - ends))
        return list(self._tokenizer.post_process(encoding, None, special).ids)

    def encode_pair(self, one: str, other: str, most: int | None) -> tuple[list[int], int]:
        first, second = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (one, other)
        )
        if most is not None:
            room = max(0, most - self._tokenizer.num_special_tokens_to_add(True))
            lengths = _shortened(len(first.ids), len(second.ids), room)
            for encoding, length in zip((first, second), lengths, strict=True):
                encoding.truncate(length)
        pair = self._tokenizer.post_process(first, second, True)
        return list(pair.ids), pair.type_ids.index(1) if 1 in pair.type_ids else 0

    @property
    def template(self) -> str:
        template = self._files.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def special(self, text: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(text) if text in self._specials else None
        return number

    def ending(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens[-ENDING:]), skip_special_tokens=False))

    def stored(self) -> str:
        return str(self._tokenizer.to_str())

    def encode_chat(
        self,
        messages: Messages,
        options: Mapping[str, Any] | None = None,
        tools: Functions = (),
    ) -> list[int]:
        """Render the template as transformers does, but keep the messages of users plain text.

        Names of special tokens in messages, and in tools, are text, too.

        Raises:
            ValueError: the template refuses the messages, or an option has the name of a special
                token.
        """
        options = {"add_generation_prompt": True, **(options or {})}
        written = json.dumps(options, ensure_ascii=False)
        for special in self._specials:
            if special in written:
                raise ValueError(f"the options of the template have the special token {special}")
        if self._files.chat_template is None:
            return self.encode("\n".join(message["content"] for message in messages))
        mark, hidden = secrets.token_hex(8), dict[str, str]()

        def marked(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {marked(key): marked(part) for key, part in value.items()}
            if isinstance(value, list | tuple):
                return [marked(part) for part in value]
            if not isinstance(value, str):
                return value
            for number, special in enumerate(self._specials):
                if special in value:
                    hidden[f"<{mark}{number}>"] = special
                    value = value.replace(special, f"<{mark}{number}>")
            return value

        try:
            rendered = self._files.apply_chat_template(
                marked(messages), tools=marked(tools) or None, tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self._encode_marked(rendered, hidden)

    def _encode_marked(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        for mark, special in hidden.items():
            if mark in text:
                before, _, behind = text.partition(mark)
                middle = self._plain.encode(special, add_special_tokens=False).ids
                return [
                    *self._encode_marked(before, hidden),
                    *middle,
                    *self._encode_marked(behind, hidden),
                ]
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:  # of a vocabulary that is padded
            return b""
        if name in self._specials:
            return name.encode()
        if self._has_bytes and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        if len(name) == 6 and name.startswith("<0x"):  # a byte that no other token has
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()  # how SentencePiece writes a space

    def decoder(
        self, prompt: Sequence[int] = (), special: bool = False, kept: Sequence[str] = ()
    ) -> Decoder:
        shown = {number for name in kept if (number := self.special(name)) is not None}
        dropped = self._numbers - shown if shown and not special else frozenset[int]()
        return _HuggingFaceDecoder(self._tokenizer, prompt, special or bool(shown), dropped)


def _byte_names() -> dict[str, int]:
    """The characters that stand for bytes in tokens of GPT-2's kind.

    Printable characters stand for their own bytes, and those from 256 on for the other bytes, in
    order (A. Radford and others, "Language models are unsupervised multitask learners", 2019).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(rest)
    }


_BYTES = _byte_names()


ENDING = 64
"""Tokens at the end of a prompt that say whether it has begun a thought."""
BEHIND = 32
"""Tokens that a decoder keeps as context: more than can be without text in a row."""


class _HuggingFaceDecoder:
    """Decodes tokens one by one.

    Args:
        special: whether the text has special tokens; `dropped` are left out all the same.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], special: bool, dropped: Set[int]
    ) -> None:
        self._tokenizer, self._skips, self._dropped = tokenizer, not special, dropped
        self._stream = self._behind(prompt)
        self._held: list[int] = []  # tokens whose text is not out

    def step(self, token: int) -> str:
        if token in self._dropped:
            return ""
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # which tokenizers raises where tokens contradict one another
            self._stream = self._behind(self._held)
            return self.rest()
        if text is None:
            return ""
        self._held.clear()
        return str(text)

    def rest(self) -> str:
        tokens, self._held = self._held, []
        return self._decode(tokens) if tokens else ""

    def _behind(self, tokens: Sequence[int]) -> DecodeStream:
        """A stream that decodes tokens behind these.

        It needs them as context, since tokenizers of SentencePiece's kind drop a first space. It
        takes the last ones that are whole characters; without any it begins a text.
        """
        for start in range(max(0, len(tokens) - BEHIND), len(tokens)):
            last = list(tokens[start:])
            if not self._decode(last).endswith("\ufffd"):
                return DecodeStream(last, skip_special_tokens=self._skips)
        return DecodeStream(skip_special_tokens=self._skips)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips))


def _shortened(one: int, other: int, room: int) -> tuple[int, int]:
    """The lengths of two texts in so much room: the longer loses tokens first.

    As `longest_first` of transformers' tokenizers does it (`truncate_encodings`).
    """
    least, most = sorted((one, other))
    most = least if least > room else max(least, room - least)
    if least + most > room:
        least, most = room // 2, room // 2 + room % 2
    return (most, least) if one > other else (least, most)


def load(model: str, chats: bool = True) -> Text:
    """The text side of a model: of a folder of transformers, or bytes of a GPT of ours."""
    folder = tokenizer_folder(model)
    return Bytes() if folder is None else HuggingFace(folder, chats)


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
