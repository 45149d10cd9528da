"""Answers of `/v1/responses`: whole ones, and events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..protocol import Completion
from ..shapes import Choice
from ..tools.deltas import Arguments, CallBegin, Delta, Reasoning

Item = dict[str, Any]


class ResponseShape:
    """Makes items of deltas: thoughts, a message, calls; each begins where another has ended."""

    done = b""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._items: list[Item] = []
        self._open: type | None = None  # of the deltas of the last item
        self._text = ""  # of the last item
        self._number = 0
        self._events: list[bytes] = []

    def opening(self) -> bytes:
        """The events ahead of the first token."""
        self._tell("response.created", response=self._response("in_progress"))
        self._tell("response.in_progress", response=self._response("in_progress"))
        return self._take()

    def chunks(self, index: int, deltas: list[Delta], choice: Choice, is_first: bool) -> bytes:
        """The events of some deltas."""
        for delta in deltas:
            self._add(delta)
        return self._take()

    def closing(self, prompt: int, choices: Sequence[Choice]) -> bytes:
        """The events behind the last token."""
        self._close()
        whole = self._end(prompt, choices)
        self._tell(f"response.{whole['status']}", response=whole)
        return self._take()

    def answer(self, texts: list[str], choices: list[Choice], prompt: int) -> dict[str, Any]:
        """The whole answer of a request without a stream."""
        (choice,), (text,) = choices, texts
        for delta in choice.deltas(text):
            self._add(delta)
        self._close()
        return self._end(prompt, choices)

    # -- items -------------------------------------------------------------------------------------

    def _add(self, delta: Delta) -> None:
        if isinstance(delta, CallBegin):
            self._begin(
                CallBegin,
                {
                    "id": f"fc_{secrets.token_hex(12)}",
                    "type": "function_call",
                    "call_id": delta.id,
                    "name": delta.name,
                    "arguments": "",
                },
            )
            return
        if isinstance(delta, Arguments):
            self._text += delta.text
            self._tell_of("response.function_call_arguments.delta", delta=delta.text)
            return
        if self._open is not type(delta):
            self._begin_text(type(delta))
        self._text += delta.text
        if isinstance(delta, Reasoning):
            self._tell_of("response.reasoning_text.delta", content_index=0, delta=delta.text)
        else:
            name = "response.output_text.delta"
            self._tell_of(name, content_index=0, delta=delta.text, logprobs=[])

    def _begin_text(self, kind: type) -> None:
        if kind is Reasoning:
            item: Item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning"}
            self._begin(kind, {**item, "summary": [], "content": []})
            return
        item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message"}
        self._begin(kind, {**item, "role": "assistant", "content": []})
        self._tell_of("response.content_part.added", content_index=0, part=_part(""))

    def _begin(self, kind: type, item: Item) -> None:
        self._close()
        self._open, self._text = kind, ""
        self._items.append({**item, "status": "in_progress"})
        place = len(self._items) - 1
        self._tell("response.output_item.added", output_index=place, item=dict(self._items[-1]))

    def _close(self) -> None:
        """End the last item."""
        if self._open is None:
            return
        item, kind, self._open = self._items[-1], self._open, None
        item["status"] = "completed"
        if kind is CallBegin:
            item["arguments"] = self._text
            name = "response.function_call_arguments.done"
            self._tell_of(name, arguments=self._text, name=item["name"])
        elif kind is Reasoning:
            item["content"] = [{"type": "reasoning_text", "text": self._text}]
            self._tell_of("response.reasoning_text.done", content_index=0, text=self._text)
        else:
            item["content"] = [_part(self._text)]
            name = "response.output_text.done"
            self._tell_of(name, content_index=0, text=self._text, logprobs=[])
            self._tell_of("response.content_part.done", content_index=0, part=_part(self._text))
        place = len(self._items) - 1
        self._tell("response.output_item.done", output_index=place, item=dict(item))

    # -- events ------------------------------------------------------------------------------------

    def _tell_of(self, name: str, /, **more: Any) -> None:
        """An event about the last item."""
        place = len(self._items) - 1
        self._tell(name, output_index=place, item_id=self._items[-1]["id"], **more)

    def _tell(self, name: str, /, **more: Any) -> None:
        body = {"type": name, "sequence_number": self._number, **more}
        self._number += 1
        self._events.append(f"event: {name}\ndata: {json.dumps(body)}\n\n".encode())

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    def _end(self, prompt: int, choices: Sequence[Choice]) -> dict[str, Any]:
        is_cut = choices[0].reason == "length"
        if is_cut and self._items:
            self._items[-1]["status"] = "incomplete"
        drawn = choices[0].count
        usage = {
            "input_tokens": prompt,
            "output_tokens": drawn,
            "total_tokens": prompt + drawn,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        whole = self._response("incomplete" if is_cut else "completed")
        reason = {"reason": "max_output_tokens"} if is_cut else None
        return {**whole, "usage": usage, "incomplete_details": reason}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._completion.model,
            "output": list(self._items),
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **(self._completion.response or {}),
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
