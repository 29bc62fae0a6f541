from tests.support.servers.fixtures import client, valkey

__all__ = ["client", "valkey"]
