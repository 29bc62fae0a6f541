"""A real Valkey and a real Ceph, behind the proxies that spoil."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from objkv.config import load_config
from objkv.stores.s3.client import open_s3_client
from tests.faults.places import Clock, Servers
from tests.support.servers.ceph import S3Server, ceph_radosgw
from tests.support.servers.redis import valkey_server
from tests.support.servers.spoil import SpoilRedis, SpoilS3


class CephProcess:
    """The same with Ceph, which keeps what it has."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.url = server.endpoint_url
        self.address = ("127.0.0.1", int(self.url.rpartition(":")[2]))

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._server.kill()

    def restart(self) -> None:
        """Start it again on its port."""
        self._server.restart()


@contextmanager
def real_servers(folder: Path) -> Iterator[Servers]:
    """Valkey and Ceph."""
    with (
        ceph_radosgw(folder / "ceph") as ceph,
        valkey_server(folder / "valkey") as server,
        SpoilS3(CephProcess(ceph).address) as s3_proxy,
        SpoilRedis(("127.0.0.1", server.port)) as redis_proxy,
    ):
        settings = {
            "s3_access_key_id": ceph.access_key,
            "s3_secret_access_key": ceph.secret_key,
            "s3_addressing": "path",
        }
        config = load_config({"s3_endpoint_url": ceph.endpoint_url} | settings)
        with closing(open_s3_client(config)) as client:
            client.create_bucket(Bucket="bucket")
        s3 = CephProcess(ceph)
        yield Servers(s3, s3_proxy, server, redis_proxy, folder, Clock(), settings)
