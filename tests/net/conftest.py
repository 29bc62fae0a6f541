from tests.support.servers.fixtures import valkey

__all__ = ["valkey"]
