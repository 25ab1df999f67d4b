"""Keeps the last responses of one server process, so that conversations go on by their ids."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from spec_runtime.serve.errors import ApiError, dumped

Object = dict[str, Any]
MOST_RESPONSES = 1000
MOST_BYTES = 32 << 20  # of all that is kept


class Kept(NamedTuple):
    """Holds JSON: a response, the chat's messages up to its end, and the items of its output by
    their ids. Parsed it would take up to fifty times as much memory."""

    response: bytes
    messages: bytes
    items: dict[str, bytes]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + sum(map(len, self.items.values()))


class ResponseStore:
    """Maps ids to responses: at most MOST_RESPONSES of MOST_BYTES, of which the one that was used
    least recently goes first.

    Whoever knows an id may use it. This server makes all ids, which nobody can guess; items are
    not found by ids that clients gave them. Threads may use it at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[str, bytes] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: Object, messages: Sequence[Object]) -> None:
        """Keeps a response, and the messages of the chat up to its end."""
        items = {item["id"]: dumped(item).encode() for item in response["output"]}
        kept = Kept(dumped(response).encode(), dumped(messages).encode(), items)
        with self._lock:
            self._kept[response["id"]] = kept
            self._items |= items
            self._size += kept.size
            while len(self._kept) > MOST_RESPONSES or self._size > MOST_BYTES:
                self._forget(next(iter(self._kept)))

    def response(self, name: str, param: str) -> bytes:
        """Returns the JSON of a response. Raises ApiError if there is none of this id; `param` is
        the request's field that holds the id."""
        with self._lock:
            return self._get(name, param).response

    def messages(self, name: str, param: str) -> list[Object]:
        """Returns the messages of the chat up to the end of a response; see `response`."""
        with self._lock:
            kept = self._get(name, param)
        messages: list[Object] = json.loads(kept.messages)
        return messages

    def item(self, name: str) -> Object:
        """Returns an item of a kept response. Raises ApiError if none has this id."""
        found = self._items.get(name)
        if found is None:
            message = (
                f"Item with id '{name:.80}' not found: this server keeps those of its last "
                "responses, until it stops, unless 'store' is false; send the item itself."
            )
            raise ApiError(404, message, param="input", code="item_not_found")
        item: Object = json.loads(found)
        return item

    def remove(self, name: str, param: str) -> None:
        """Forgets a response; raises ApiError if there is none. Those that went on from it keep
        the conversation."""
        with self._lock:
            self._get(name, param)
            self._forget(name)

    def _get(self, name: str, param: str) -> Kept:
        if name not in self._kept:
            message = (
                f"Response with id '{name:.80}' not found: this server keeps the last ones, until "
                "it stops, unless 'store' is false; send the whole conversation as 'input'."
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        self._kept.move_to_end(name)
        return self._kept[name]

    def _forget(self, name: str) -> None:
        gone = self._kept.pop(name)
        self._size -= gone.size
        for item in gone.items:
            del self._items[item]
