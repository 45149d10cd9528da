"""Fields about sampling: what bodies may say, and what is made of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front.adjusting import DEFAULTS, Rules, rules_of
from examples.serve.front.choices import Choice, Offsets, Reading
from examples.serve.front.errors import ApiError
from examples.serve.front.names import Names
from examples.serve.front.protocol import Completion, completion
from examples.serve.front.text import Bytes
from examples.serve.requests import Adjustments, End, Limits, Request, Sampling
from examples.serve.wire import WireError, pack_requests, unpack_requests

LIMITS = Limits(1, 8, 32, 200, 8, 512, 256, (0, 9))


class Words(Bytes):
    """Bytes, but a space and the letter behind it are one token, the letter's capital."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        for letter in "abc":
            text = text.replace(f" {letter}", letter.upper())
        return [*([1] if special else []), *text.encode()]


def read(rules: Rules | None = None, is_chat: bool = False, **body: Any) -> Completion:
    asked = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    return completion({**asked, **body}, is_chat, Names(("fake",)), Words(), LIMITS, rules)


def adjustments(**body: Any) -> Adjustments | None:
    return read(**body).sampling.adjustments


NOTHING = [
    {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "min_p": 0},
    {"logit_bias": {}, "bad_words": [], "stop_token_ids": [], "min_tokens": 0},
    {"allowed_token_ids": None, "top_k": -1},
    {"min_tokens": 5, "ignore_eos": True},
    {"stop_token_ids": [3, 4]},
]


@pytest.mark.parametrize("body", NOTHING)
def test_values_that_ask_for_nothing_cost_nothing(body: dict[str, Any]) -> None:
    assert adjustments(**body) is None


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"frequency_penalty": -2, "presence_penalty": 2}, {"frequency": -2.0, "presence": 2.0}),
        ({"repetition_penalty": 1.1, "min_p": 0.5}, {"repetition": 1.1, "min_p": 0.5}),
        ({"logit_bias": {"7": 100, "3": -0.5}}, {"biases": ((3, -0.5), (7, 100.0))}),
        ({"allowed_token_ids": [9, 5, 9]}, {"allowed": (5, 9)}),
        ({"min_tokens": 3}, {"held": (0, 9), "min_tokens": 3}),
        ({"min_tokens": 3, "stop_token_ids": [5]}, {"held": (0, 5, 9), "min_tokens": 3}),
        (
            {"min_tokens": 3, "stop_token_ids": [5], "ignore_eos": True},
            {"held": (5,), "min_tokens": 3},
        ),
        # The word is one token at the beginning of a text, and one behind a space.
        ({"bad_words": ["a", "z"]}, {"banned": tuple(sorted(b"aAz"))}),
        ({"bad_words": ["ax"]}, {"bad_words": (tuple(b"ax"), tuple(b"Ax"))}),
        ({"bad_words": ["xa"]}, {"bad_words": (tuple(b"xa"),)}),
    ],
)
def test_what_is_made_of_fields(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert adjustments(**body) == Adjustments(**wanted)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty", "from -2 to 2"),
        ({"presence_penalty": "1"}, "presence_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be above 0"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "'256', which is no token id from 0 to 255"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"3": True}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
        ({"allowed_token_ids": [256]}, "allowed_token_ids", "token ids from 0 to 255"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "token ids from 0 to 255"),
        ({"stop_token_ids": 3}, "stop_token_ids", "token ids from 0 to 255"),
        ({"bad_words": "x"}, "bad_words", "a list of strings"),
        ({"bad_words": [""]}, "bad_words", "none of them empty"),
        ({"bad_words": ["x" * 17]}, "bad_words", "at most 16 tokens"),
        ({"bad_words": [f"{n:03}" for n in range(129)]}, "bad_words", "at most 128 words"),
        ({"min_tokens": 17}, "min_tokens", "at most the tokens of the answer, 16"),
        ({"allowed_token_ids": [9], "min_tokens": 1}, "allowed_token_ids", "no token may be left"),
        ({"allowed_token_ids": [97], "bad_words": ["za"]}, "allowed_token_ids", "may be left"),
        ({"stop": ["a"] * 5}, "stop", "at most 4; see --stops"),
        ({"n": 9}, "n", "from 1 to 8"),
        ({"prompt": ["x"] * 9}, "prompt", "at most 8 prompts; see --choices"),
        ({"prompt": ["x"] * 3, "n": 3}, "n", "at most 8; see --choices"),
        ({"prompt": 5}, "prompt", "prompt must be a text, a list of token ids, or a list"),
        ({"prompt": None}, "prompt", "prompt is missing: give a text"),
        ({"prompt": [1, "x"]}, "prompt", "something that is no token id"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or at least 1"),
        ({"use_beam_search": True}, "use_beam_search", "is not supported by this endpoint"),
        ({"priority": 3}, "priority", "is not supported by this endpoint"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x"),
    ],
)
def test_values_that_are_refused(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_limits_of_a_request_are_options() -> None:
    rules = Rules(choices=20, stops=9)
    found = read(rules, prompt=["x"] * 10, n=2, stop=["a"] * 9)
    assert (found.choices, len(found.stop)) == (20, 9)


@pytest.mark.parametrize(("length", "left"), [(3, b"xyz"), (50, b"\x01wxyz"), (-1, b"\x01wxyz")])
def test_the_end_of_a_prompt_is_kept(length: int, left: bytes) -> None:
    assert read(prompt="wxyz", truncate_prompt_tokens=length).prompts == (tuple(left),)


def test_as_much_of_a_prompt_as_there_is_room_for() -> None:
    (prompt,) = read(prompt=[7] * 500 + [8] * 12, truncate_prompt_tokens=-1, max_tokens=99).prompts
    assert (len(prompt), prompt[-13:]) == (413, (7, *[8] * 12))


def test_special_tokens_of_a_prompt() -> None:
    assert read(prompt="x").prompts == ((1, 120),)
    assert read(prompt="x", add_special_tokens=False).prompts == ((120,),)


# -- chats -----------------------------------------------------------------------------------------


class Templates(Words):
    """It remembers what the template was given."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        self.options = options
        return [1]


def template(**body: Any) -> Mapping[str, Any] | None:
    text = Templates()
    roles = ("user", "assistant")
    asked = {"messages": [{"role": role, "content": "x"} for role in roles], **body}
    completion(asked, True, Names(("fake",)), text, LIMITS)
    return text.options


def test_what_a_template_is_given() -> None:
    begins = {"add_generation_prompt": True, "continue_final_message": False}
    assert template() == begins
    assert template(chat_template_kwargs={"enable_thinking": False}) == {
        **begins,
        "enable_thinking": False,
    }
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert template(**goes_on) == goes_on
    with pytest.raises(ApiError, match="needs add_generation_prompt=false"):
        template(continue_final_message=True)
    with pytest.raises(ApiError, match="may not have tokenize"):
        template(chat_template_kwargs={"tokenize": True})
    with pytest.raises(ApiError, match="a last message of the assistant"):
        read(is_chat=True, **goes_on)


# -- defaults --------------------------------------------------------------------------------------


def test_defaults_of_a_model(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "max_new_tokens": 7}))
    rules = rules_of(tmp_path, Rules(stops=5))
    assert set(rules.defaults) < set(DEFAULTS)
    shown = "temperature 0.6, top_k 20, repetition_penalty 1.1, max_tokens of chats 7"
    assert rules.shown() == shown
    found = read(rules)
    assert found.sampling.temperature == 0.6
    assert found.sampling.top_k == 20
    assert found.sampling.adjustments == Adjustments(repetition=1.1)
    assert (found.max_tokens, read(rules, is_chat=True).max_tokens) == (16, 7)
    own = read(rules, temperature=0, top_k=-1, repetition_penalty=1.0, is_chat=True, max_tokens=9)
    assert own.sampling == Sampling(seed=own.sampling.seed)
    assert own.max_tokens == 9
    assert rules_of(tmp_path / "none", Rules()) == Rules()


@pytest.mark.parametrize("config", [{"temperature": 3}, {"top_k": "a"}, {"max_new_tokens": 0}])
def test_defaults_that_nobody_could_use(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"generation_config\.json: .*--generation-config none"):
        rules_of(tmp_path, Rules())


# -- on the way to the engine ----------------------------------------------------------------------


def test_requests_cross_the_socket() -> None:
    changes = Adjustments((1,), (2, 3), ((4, 5), (6,)), (7,), 8, ((9, 0.5),), 1.5, -1.0, 2.0, 0.25)
    requests = [
        Request(1, (1, 2), 3, Sampling(0.5, adjustments=changes), stops=(4, 5), salt=b"a"),
        Request(2, (3,), 4, Sampling(0.5, adjustments=Adjustments(allowed=(1,)))),
        Request(3, (), 1, stops=(9,), prompt_logprobs=0),
    ]
    (payload,) = pack_requests(requests)
    assert unpack_requests(payload) == requests
    for wrong in (b"[]", b'{"x": 1}', b"{"):
        with pytest.raises(WireError):
            unpack_requests(payload.replace(b'{"banned"', wrong.ljust(9)[:9], 1))


# -- text ------------------------------------------------------------------------------------------


def fed(reading: Reading, tokens: bytes, last: int | None = None) -> tuple[str, Choice]:
    choice = Choice(Bytes(), reading)
    shown: list[str] = []
    for token in tokens:
        if choice.reason is None:
            shown.append(choice.feed([token], None))
    if choice.reason is None:
        end = End(1, "length" if last is None else "stop", len(tokens) + 1, token=last)
        shown.append(choice.feed([], end))
    return "".join(shown), choice


def test_what_ends_a_text_may_be_a_part_of_it() -> None:
    for keeps, wanted in ((False, "ab"), (True, "abstop")):
        text, choice = fed(Reading(("stop",), keeps_stop=keeps), b"abstop")
        assert (text, choice.reason, choice.stop_reason) == (wanted, "stop", "stop")
    for keeps, wanted in ((False, "ab"), (True, "ab!")):
        text, choice = fed(Reading(ends=(33,), keeps_stop=keeps, ids=True), b"ab", 33)
        assert (text, choice.reason, choice.stop_reason) == (wanted, "stop", 33)
        assert choice.take_ids() == [97, 98, 33]
    assert fed(Reading(), b"ab", 33)[1].stop_reason is None  # the model's own


def test_stop_strings_count_behind_the_first_tokens() -> None:
    text, choice = fed(Reading(("b",), min_tokens=3), b"abcabc")
    assert (text, choice.count) == ("abca", 5)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"a", b"\xc3", b"\xa9", b"b"],
        [b"\xc3", b"a", b"\xc3", b"\xc3", b"b"],
        [b"\xff", b"\xff", b"x", b"\xf0\x9f", b"\x98", b"\x80", b"\xe2\x82", b"z"],
        [b"h\xc3", b"\xa9\xc3", b"\xa9l", b"lo"],
        [b"\x80", b"\xbf\x80", b"ab\xf0", b"\x90c"],
    ],
)
def test_where_the_text_of_tokens_begins(pieces: list[bytes]) -> None:
    """Text comes out as soon as it is whole, or at once with what makes it so, as from a stream."""
    for holds in (False, True):
        offsets, decoder, out = Offsets(), Bytes().decoder(), ""
        for place, piece in enumerate(pieces):
            text = "".join(decoder.step(byte) for byte in piece)
            before = b"".join(pieces[:place])
            wanted = len((before + piece[:1]).decode(errors="replace")) - 1
            is_open = (before + piece).decode(errors="replace").endswith("\ufffd")
            out += text
            shown, out = ("", out) if holds and is_open else (out, "")
            assert offsets.step(piece, shown) == wanted
