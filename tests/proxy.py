"""A bad network without root: a TCP proxy in front of a worker that delays, splits and merges what passes, and cuts it.

    peers --dial--> 127.0.0.1:port (proxy) ==delay, jitter, other segments==> 127.0.0.2:port (worker)

A plan's host has the proxy's address as its own, and the worker's as `listen`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

from pd_format.plan import Host

__all__ = ["Proxy", "proxies"]

_BLOCK = 64 << 10
_BLOCKS = 64
"""That may be under way in a direction of a connection before the sender is held up."""


class Proxy:
    """In front of one worker, on a loop that runs in a thread of its own; use `proxies`.

    Args:
        loop: of that thread.
        delay_ms: of each direction.
        jitter_ms: the most that is added to it, anew for every block that is read; nothing is overtaken.
        seed: of jitter and segments.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_ms: float, jitter_ms: float, seed: int) -> None:
        self._loop = loop
        self._delay_s, self._jitter_s = delay_ms / 1000, jitter_ms / 1000
        self._random = random.Random(seed)
        self._connections: set[asyncio.Task[None]] = set()
        self.passed_bytes = 0
        self.segments = 0
        self.seen = bytearray()
        """All that has passed, in both directions."""
        # No other program is given the port at the worker's address in the meantime.
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.host = Host(address="127.0.0.1", port=self._listening.getsockname()[1], listen="127.0.0.2")

    def cut(self) -> None:
        """Close all connections, with what is under way; later ones are served. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for each in self._connections:
            each.cancel()

    async def open(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, sock=self._listening)

    async def end(self) -> None:
        self._cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        writers = [writer]
        try:
            there_reader, there_writer = await asyncio.open_connection(self.host.listen, self.host.port)
            writers.append(there_writer)
            both = [
                asyncio.ensure_future(self._pass(*ends)) for ends in ((reader, there_writer), (there_reader, writer))
            ]
            try:
                await asyncio.gather(*both)
            finally:
                for each in both:
                    each.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # Nobody listens there, or it was cut.
        finally:
            for each in writers:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_BLOCKS)

        async def read() -> None:
            due = 0.0
            while block := await reader.read(_BLOCK):
                due = max(due, self._loop.time() + self._delay_s + self._random.uniform(0, self._jitter_s))
                await under_way.put((due, block))
            await under_way.put((due, b""))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                due, content = await under_way.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                ended = not content
                while not under_way.empty() and not ended:  # What is there by now leaves together.
                    _, block = under_way.get_nowait()
                    ended = not block
                    content += block
                await self._write(writer, content)
                if ended:
                    writer.write_eof()
                    return
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _write(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        """In pieces that end anywhere: after the first bytes, in the middle, before the last ones."""
        self.seen += content
        self.passed_bytes += len(content)
        start = 0
        while start < len(content):
            end = start + self._random.choice((1, 7, 100, 1500, _BLOCK))
            writer.write(content[start:end])
            await writer.drain()
            start = end
            self.segments += 1


@contextlib.contextmanager
def proxies(count: int, delay_ms: float = 0.0, jitter_ms: float = 0.0) -> Iterator[list[Proxy]]:
    """Proxies for so many workers, in one thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxies")
    thread.start()
    made = [Proxy(loop, delay_ms, jitter_ms, seed) for seed in range(count)]
    servers = [asyncio.run_coroutine_threadsafe(each.open(), loop).result() for each in made]
    try:
        yield made
    finally:
        for server in servers:
            loop.call_soon_threadsafe(server.close)
        for each in made:
            asyncio.run_coroutine_threadsafe(each.end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
