"""No file has a secret, or anything of the machine that it was written on."""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from scripts.checks import ROOT, line_of, name_of, tracked

SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\b(?:gh[oprsu]_|github_pat_|hf_|pypi-|sk-|glpat-|xox[abp]-)[A-Za-z0-9_-]{20,}"
    r"|\bAIza[A-Za-z0-9_-]{35}"
    r"|//[^/\s:@'\"{}$]+:[^/\s:@'\"{}$]{12,}@(?!\w*example)[\w-]+\.[\w.-]+"
)
FOLDERS = re.compile(r"(?<![\w.$}~/-])/(?:home|Users|root|work)/(?!user\b|objkv\b)\w[\w.-]*")
INDEXES = re.compile(r"(?:index-url|trusted-host|registry|find-links)[ =\"']+https?://([\w.-]+)")
PUBLIC = ("pypi.org", "pytorch.org", "example.com", "registry.terraform.io")
"""Hosts that anyone may install from."""
MADE_UP = {"AKIAOBJKVSECRETTHREE"}
"""Of tests."""


def of_this_machine() -> set[str]:
    """Names that mean something here alone."""
    found = {str(ROOT), str(ROOT.resolve()), str(Path.home()), socket.gethostname()}
    found |= {
        urlsplit(url).hostname or "" for name, url in os.environ.items() if "INDEX_URL" in name
    }
    return {one for one in found if len(one) > 6 and not one.endswith(PUBLIC)}


def findings() -> Iterator[str]:
    """Each secret and each name."""
    here = re.compile("|".join(map(re.escape, sorted(of_this_machine()))) or r"(?!)")
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for what, pattern in (("a secret", SECRETS), ("a folder of one machine", FOLDERS),
                              ("a name of this machine", here)):  # fmt: skip
            for found in pattern.finditer(text):
                if found[0] not in MADE_UP:
                    yield f"{name_of(path)}:{line_of(text, found.start())}: {what}: take it out"
        for found in INDEXES.finditer(text):
            if "." in found[1] and not found[1].endswith(PUBLIC):
                yield f"{name_of(path)}:{line_of(text, found.start())}: a package index of one site"
