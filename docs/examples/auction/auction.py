"""An auction: bid1 and bid2 accept bids over HTTP, web1 and web2 show the highest ones.

Run ``python auction.py bid1 settings.json``, and likewise the other three.
"""

import json
import sys
from pathlib import Path
from typing import Any

from twisted.application.internet import StreamServerEndpointService
from twisted.internet import reactor  # noqa: TID251
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from synapse_replication import api

log = Logger()
WRITERS = ("bid1", "bid2")

BIDS = api.TableStream(
    name="bids", table="bids", id_column="stream_id", writer_column="instance_name",
    sequence="bids_seq", columns={"lot": "text", "amount": "integer"}, writers=WRITERS,
)  # fmt: skip

RAISE = """
    INSERT INTO lots VALUES (%s, %s) ON CONFLICT (lot)
    DO UPDATE SET highest = greatest(lots.highest, excluded.highest)
"""


class Place(Resource):
    """POST a list of bids: they update the lots and become rows, or neither."""

    isLeaf = True  # noqa: N815

    def __init__(self, replication: api.Replication) -> None:
        super().__init__()
        self._replication = replication

    def render_POST(self, request: Any) -> int:
        placed = Deferred.fromCoroutine(self._place(json.load(request.content)))
        placed.addCallback(lambda token: request.write(b"%d" % token))
        placed.addErrback(self._failed, request)
        placed.addCallback(lambda _: request.finish())
        return NOT_DONE_YET

    async def _place(self, bids: list[dict[str, Any]]) -> int:
        rows = [BIDS.row_type(bid["lot"], bid["amount"]) for bid in bids]

        def write(txn: api.Transaction) -> int:
            # In a fixed order, so that transactions do not wait for one another.
            for row in sorted(rows, key=lambda row: row.lot):
                txn.execute(RAISE, (row.lot, row.amount))
            return self._replication["bids"].write_txn(txn, rows)

        return await self._replication.database.transact("bid", write)

    def _failed(self, failure: Any, request: Any) -> None:
        is_bad = failure.check(api.LocalProtocolError, KeyError)
        if not is_bad:
            log.failure("cannot place a bid", failure)
        request.setResponseCode(400 if is_bad else 500)
        request.write(failure.getErrorMessage().encode())


class Highest(Resource):
    """A sink that holds the bids of each lot; GET returns them."""

    isLeaf = True  # noqa: N815

    def __init__(self) -> None:
        super().__init__()
        self._amounts: dict[str, list[int]] = {}

    def on_rdata(self, stream: str, writer: str, token: int, rows: list[Any]) -> None:
        for row in rows:
            self._amounts.setdefault(row.lot, []).append(row.amount)

    def on_position(self, stream: str, writer: str, token: int) -> None:
        """Do nothing: the bids are filled from the start after each restart."""

    def render_GET(self, request: Any) -> bytes:
        highest = {lot: max(amounts) for lot, amounts in self._amounts.items()}
        return json.dumps({"highest": highest, "bids": self._amounts}).encode()


def make_service(name: str, settings: dict[str, Any]) -> api.Replication:
    ports, pair = settings["ports"], settings["certificates"][name]
    tls = api.TlsConfig(
        ca_file=settings["authority"],
        certificate_file=pair["certificate"],
        private_key_file=pair["private_key"],
        listener_certificate_file=pair["certificate"],
        listener_private_key_file=pair["private_key"],
        client_ca_file=settings["authority"],
    )
    link: dict[str, Any]
    if "redis" in settings:
        link = {"redis": api.RedisOptions(port=settings["redis"])}
    else:
        peers = [writer for writer in WRITERS if writer != name]
        link = {
            "tcp_connect": [f"tls:localhost:{ports[peer]['tcp']}" for peer in peers]
        }
    listeners = []
    if name in WRITERS:
        listeners.append(api.Listener(ports[name]["rows"], tls=True))
        if "tcp_connect" in link:
            port = ports[name]["tcp"]
            listeners.append(api.Listener(port, direct_tcp=True, tls=True))
    options = api.ReplicationOptions(
        server_name=settings["server_name"],
        instance_name=name,
        streams=[BIDS],
        database=settings["database"],
        instances={
            writer: api.InstanceLocation("localhost", ports[writer]["rows"], tls=True)
            for writer in WRITERS
        },
        listeners=listeners,
        tls=tls,
        fill_sink=name not in WRITERS,
        **link,
    )
    sink = Highest()
    replication = api.Replication(reactor, options, sink)
    site = Site(Place(replication) if name in WRITERS else sink)
    endpoint = TCP4ServerEndpoint(reactor, ports[name]["http"], interface="127.0.0.1")
    front = StreamServerEndpointService(endpoint, site)
    front.setServiceParent(replication.services)
    return replication


if __name__ == "__main__":
    api.start_logging(sys.stderr)
    settings = json.loads(Path(sys.argv[2]).read_text())
    sys.exit(api.run_service(reactor, lambda: make_service(sys.argv[1], settings)))
