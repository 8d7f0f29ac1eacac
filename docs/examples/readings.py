"""Readings: a stream whose rows come from a REST service."""

from pathlib import Path
from typing import Any

import attrs
import treq
from twisted.application.internet import TimerService

from synapse_replication import api


@attrs.frozen
class Reading:
    place: str
    degrees: float


class ReadingStream:
    """The readings of a service that numbers them: 1, 2, 3...

    ``GET URL?after=5&upto=9`` answers ``{"rows": [[6, ["Oslo", -3.5]], ...], "upto":
    9}``, in which a row is the list of its fields; ``GET URL/newest`` answers 9.
    """

    description = api.StreamDescription(
        "readings", api.AttrsRowCodec("readings", Reading)
    )

    def __init__(self, own_name: str, url: str) -> None:
        self._own_name, self._url = own_name, url
        self._tokens: dict[str, int] = {}

    # -- positions: of the writer, what it has seen; of others, what was delivered ----

    def current_token(self, instance_name: str) -> int:
        return self._tokens.get(instance_name, 0)

    def minimal_local_current_token(self) -> int:
        return self.current_token(self._own_name)

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        return self.minimal_local_current_token() > from_token

    def is_plausible(self, instance_name: str, token: int) -> bool:
        return token <= self.current_token(instance_name) + 1_000_000

    def advance(self, instance_name: str, token: int, **_: Any) -> None:
        self._tokens[instance_name] = token

    # -- rows -------------------------------------------------------------------------

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> api.StreamUpdateResult:
        page = await self._get("", after=from_token, upto=upto_token)
        upto = page["upto"]
        return api.StreamUpdateResult(page["rows"], upto, limited=upto < upto_token)

    async def newest(self) -> int:
        return int(await self._get("/newest"))

    async def _get(self, path: str, **query: int) -> Any:
        params = {name: str(value) for name, value in query.items()}
        try:
            response = await treq.get(self._url + path, params=params, timeout=10)
            return await treq.json_content(response)
        except Exception as error:  # whatever the service did: it is asked again
            raise api.CatchUpError(f"no readings from {self._url}: {error}") from error


def add_stream(host: Any, config: dict[str, Any]) -> TimerService | None:
    own_name = host.identity.instance_name
    stream = ReadingStream(own_name, config["url"])
    is_writer = own_name == config["writer"]
    host.streams.add(stream, is_written_here=is_writer, writers=[config["writer"]])
    if not is_writer:
        return None
    saved = Path(config["saved_token"])
    if saved.exists():  # the writer was started before: it continues there
        stream.advance(own_name, int(saved.read_text() or 0))

    def announce(token: int) -> None:
        saved.write_text(str(token))
        stream.advance(own_name, token)
        host.notifier.notify()  # the rows up to there are fetched, and sent

    async def poll() -> None:
        token = await stream.newest()
        if token > stream.current_token(own_name):
            announce(token)

    def start() -> Any:  # a failure is logged, and does not stop the timer
        return host.run_as_background_process("poll-readings", poll)

    return TimerService(1.0, start)
