"""Accepts connections in one of several worker processes, so that the idlest takes the next one."""

import asyncio
import socket
from contextlib import suppress

import uvicorn
from uvicorn.supervisors.multiprocess import Process

WAIT_SECONDS = 0.005  # for each connection that a process has, before it takes another
MOST_SECONDS = 0.05  # that a connection waits where all processes have many
PAUSE_SECONDS = 1.0  # after an error, as where too many files are open


class IdlestServer(uvicorn.Server):
    """Leaves a new connection to processes that have fewer: waits the longer before it takes one,
    the more it has itself.

    uvicorn's own loop takes all connections that have come, in whichever process wakes first.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        listening.listen(self.config.backlog)
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            await _until_readable(listening)
            num_open = len(self.server_state.connections)
            await asyncio.sleep(min(MOST_SECONDS, WAIT_SECONDS * num_open))
            try:
                with suppress(BlockingIOError):  # another process was faster
                    connection, _ = listening.accept()
                    await loop.connect_accepted_socket(self._protocol, connection)
            except OSError:
                await asyncio.sleep(PAUSE_SECONDS)

    def _protocol(self) -> asyncio.Protocol:
        kind = self.config.http_protocol_class
        found: asyncio.Protocol = kind(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return found


async def _until_readable(listening: socket.socket) -> None:
    """Waits until a connection can be accepted."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(listening, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(listening)


class Worker(Process):
    """A process with such a server."""

    @property
    def server(self) -> uvicorn.Server:
        if self._server is None:
            self._server = IdlestServer(config=self.config)
        return self._server
