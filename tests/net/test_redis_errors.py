"""What a failed call to Redis means, and who can act."""

import pytest
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from objkv.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable
from objkv.net.redis_errors import translated

ERRORS: dict[type[StoreError], list[tuple[Exception, str]]] = {
    StoreUnavailable: [
        (exceptions.ConnectionError("gone"), "gone"),
        (exceptions.TimeoutError("slow"), "slow"),
        (exceptions.BusyLoadingError("loading"), "loading"),
        (exceptions.ReadOnlyError("You can't write"), "can't write"),
        (exceptions.ClusterDownError("down"), "down"),
        (exceptions.SlotNotCoveredError("slot 7"), "slot 7"),
        (exceptions.MaxConnectionsError("too many"), "too many"),
        (exceptions.TryAgainError("later"), "later"),
        (exceptions.MasterDownError("MASTERDOWN"), "MASTERDOWN"),
        (exceptions.RedisClusterException("no node"), "no node"),
        (exceptions.MovedError("1 127.0.0.1:7000"), "redis[+]cluster"),
        (exceptions.ResponseError("MISCONF disk"), "MISCONF"),
        (exceptions.ResponseError("LOADING the dataset in memory"), "LOADING"),
        (exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), "MASTERDOWN"),
        (MasterNotFoundError("no primary"), "no primary"),
    ],
    StoreFull: [
        (exceptions.ResponseError("ERR @user_script:3: -OOM no"), "maxmemory"),
        (exceptions.OutOfMemoryError("command not allowed"), "maxmemory"),
    ],
    StoreDenied: [
        (exceptions.AuthenticationError("invalid password"), "redis_password"),
        (exceptions.AuthorizationError("no"), "redis_password"),
        (exceptions.ResponseError("NOAUTH Authentication required."), "redis_password"),
        (exceptions.ResponseError("WRONGPASS invalid username-password pair"), "redis_password"),
        (exceptions.NoPermissionError("hset"), "objkv access"),
        (exceptions.ResponseError("NOPERM no permissions to run 'get'"), "objkv access"),
        (exceptions.ResponseError("ERR ACL failure in script: x"), "objkv access"),
        (exceptions.ResponseError("DB index is out of range"), "end index_url"),
    ],
    StoreError: [
        (exceptions.ResponseError("ERR something else"), "something else"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "error", "words"), [(kind, *one) for kind, some in ERRORS.items() for one in some]
)
def test_errors_say_who_can_act(kind: type[StoreError], error: Exception, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught, translated("get k"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
