"""Whether what goes to the stores can be read on its way, and by whom. Looks at settings only."""

from urllib.parse import urlsplit

from objkv.config import Config, clear_hosts
from objkv.ops.probes import Area, Check

_FIX = "write {}:// if the server speaks TLS; whoever listens learns passwords and prompts"


def check_transport(config: Config) -> list[Check]:
    """One check for each end that is a server; a warning where one is reached in clear."""
    checks = []
    if config.bulk_url.startswith("s3:"):
        checks.append(_judge("bulk", config.s3_endpoint_url or "https:", "https"))
    if config.index_url.startswith("redis"):
        scheme = urlsplit(config.index_url).scheme.replace("rediss", "redis")
        checks.append(_judge("index", config.index_url, scheme.replace("redis", "rediss")))
    return checks


def check_login(config: Config) -> list[Check]:
    """A warning where a server on another machine is asked without a name and a password: if it
    answers, it lets in everybody, as ``default``, with all rights."""
    url = config.index_url
    if not url.startswith("redis") or not clear_hosts(url.replace("rediss", "redis", 1)):
        return []
    if config.redis_password or config.redis_cert_file or urlsplit(url).password:
        return []
    detail = "no name and password are set: a server that answers lets everybody do everything"
    fix = "give each role a user (objkv access), and switch the user default off"
    return [Check("index", "login", "warning", detail, fix)]


def _judge(area: Area, url: str, secure: str) -> Check:
    scheme = urlsplit(url).scheme
    if scheme == secure:
        return Check(area, "transport", "ok", "TLS; the server's certificate is verified")
    if not clear_hosts(url):
        return Check(area, "transport", "ok", "in clear, on this machine only")
    detail = "in clear over the network, because allow_plaintext is set"
    return Check(area, "transport", "warning", detail, _FIX.format(secure))
