"""Keeps the last responses of one server process, so that conversations go on by their ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from spec_runtime.serve.errors import ApiError, dumped

Object = dict[str, Any]
MOST_RESPONSES = 1000
MOST_BYTES = 32 << 20  # of the conversations' JSON, the parts that several share counted each time


class Kept(NamedTuple):
    """A response, the items of the conversation up to its end, and the size of these in bytes."""

    response: Object
    items: list[Object]
    size: int


class ResponseStore:
    """Maps ids to responses: at most MOST_RESPONSES of MOST_BYTES, of which the one that was used
    least recently goes first. Used by one event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: Object, before: Kept | None, added: Sequence[Object]) -> None:
        """Keeps a response to the items `added` after an earlier response, or None."""
        new = [*added, *response["output"]]
        items, size = new, len(dumped(new)) + len(dumped(response))
        if before is not None:
            items, size = [*before.items, *new], before.size + size
        self._kept[response["id"]] = Kept(response, items, size)
        self._size += size
        while len(self._kept) > MOST_RESPONSES or self._size > MOST_BYTES:
            _, gone = self._kept.popitem(last=False)
            self._size -= gone.size

    def get(self, name: str, param: str) -> Kept:
        """Returns what is kept under an id. Raises ApiError if there is none; `param` is the
        request's field that holds the id."""
        if name not in self._kept:
            message = (
                f"Response with id '{name:.80}' not found: this server keeps the last ones, until "
                "it stops, unless 'store' is false; send the whole conversation as 'input'."
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        self._kept.move_to_end(name)
        return self._kept[name]

    def item(self, name: str) -> Object:
        """Returns an item of a kept conversation. Raises ApiError if none has this id."""
        for kept in reversed(self._kept.values()):
            for item in reversed(kept.items):
                if item.get("id") == name:
                    return item
        message = (
            f"Item with id '{name:.80}' not found: this server keeps those of the last responses, "
            "until it stops, unless 'store' is false; send the item itself."
        )
        raise ApiError(404, message, param="input", code="item_not_found")

    def remove(self, name: str, param: str) -> None:
        """Forgets a response; raises ApiError if there is none. Those that went on from it keep
        the conversation."""
        self._size -= self.get(name, param).size
        del self._kept[name]
