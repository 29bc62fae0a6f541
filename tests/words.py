"""Finds wording that a native engineer has to read twice.

``python -m tests.words PATH...`` prints one line for each finding in Markdown (prose only) and in
Python (docstrings, comments and sentences in string literals).
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    "name the role": (
        r"\b(whoever|whomever|nobody|somebody|anybody|everybody|no one)\b",
        r"\b(he|him|his|she)\b",
    ),
    "name the thing": (r"\bwhat (is|was|are|were|has|had)\b(?![^.?!]*\?)", r"\bthat is what\b"),
    "report, print, return, expose": (r"\b(tells?|telling|told)\b",),
    "query, request, call": (
        r"(?<!users )(?<!user )(?<!people )(?<!you )(?<!who )\b(asks|asked|asking)\b",
    ),
    "report, state, return, show": (r"\b(says|said|saying|say so)\b",),
    "receive, notice": (r"\b(hears?|heard)\b",),
    "two sentences": (r"(?<!most )(?<!all )(?<!each )(?<!one )(?<!some )\bof (which|whom)\b",),
    "as long as, while": (r"\bso long\b",),
    "except for, only": (r"\bbut for\b", r"\bnothing but\b", r"\bnone but\b"),
    "alone, on its own": (r"\bby itself\b",),
    "next to, along with": (r"\bbeside\b",),
    "store and index, backend": (
        r"\b(both|either|each|neither|the other) (\w+ )?ends?\b"
        r"(?! (to|of|with|in|at|up|when|the|once)\b)",
    ),
    "skipped, untouched, circuit open": (
        r"\b(left|leaves?|leaving) (it |them |one |this |that )?alone\b",
    ),
    "fix, repair, issue": (r"\bmend(s|ed|ing)?\b",),
    "quarantined": (r"\bout of use\b",),
    "useless, useful, unused": (r"\bof (no|some|any|what) use\b",),
    "must be, will be": (r"\b(is|are|was|were) to be\b",),
    "is not a": (
        r"\b(?<!there )(is|are|was|were) no "
        r"(?!longer|more|less|\w+er\b|different|such)\w+(?= *[,;:.]|$)",
    ),
    "exists, is missing": (
        r"\b(is|are|was|were) (not |all |already |still )?there\b"
        r"(?! (a|an|any|is|are|no|enough|for)\b)",
    ),
    "is in": (
        r"\b(lies|lie|lay) (in|at|under|on|below|there|where|next|outside|inside)\b",
        r"\b(stands?|stood) (in|at|there|before|alone|under)\b",
    ),
    "inspect": (r"\b(looks?|looked|looking) into\b",),
    "say it positively": (
        r"\bnot un(?!til|less|der|ique|ion|it|iversal|iform|ix|ary|pack|lock)\w+",
    ),
    "our, your": (r"\bof (ours|yours|theirs|mine|hers)\b",),
    "no personification": (
        r"\b(believes?|forgives?|dares?|wishes|wants)\b",
        r"\b(objkv|vLLM|Redis|S3|index|store|bucket|engine|process|it) knows?\b",
        r"\b(replica|worker|scheduler) knows?\b",
    ),
    "plain words": (
        r"\b(thereof|therein|whereby|wherein|hitherto|whence|herein|lest|albeit)\b",
        r"\b(anew|ought|shall|in vain|in the mean)\b",
        r"\bin (its|their) stead\b",
    ),
    "rephrase": (
        r"\bit is (then|thus)\b",
        r"\b(is|are) so(?= *[.,;:])",
        r"\b(goes|went|gone) (its|their) way\b",
    ),
}
"""What to write in place of which words."""

AT_START: Final[dict[str, str]] = {
    r"Of (?!\d|these\b|those\b|course\b|the \d|the \w+, \d)": "a fragment: name the subject",
    r"What (?![^.?!]*\?)": "name the thing",
    r"Where (?![^.?!]*\?)": "if, or when",
    r"(Whether or not|That which|Those which)\b": "rephrase",
    r"(Nor|But for|So long)\b": "rephrase",
    r"Without it: ": "a sentence",
}
"""What not to begin a sentence with, and what to do about it."""

WIDTH_MAX: Final = 200
"""Characters of a line of Markdown outside fences."""
GENERATED: Final = "<!-- Written by scripts/"
"""Marks a page that a script writes: the rows of its tables may be longer."""

_LISTS = Path(__file__).with_name("verbs.txt").read_text().split("\n\n")
VERBS: Final = frozenset(_LISTS[0].split())
"""What objkv, its users and the programs around it do; then irregular forms."""
_FORMS = frozenset(_LISTS[1].split())

_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1[ \t]*$", re.MULTILINE | re.DOTALL)
_WRITTEN = re.compile(r"<!-- [\w ]+: written by `.*?<!-- end of ", re.DOTALL)
"""A table within a page that a command writes."""
_HIDDEN = re.compile(
    r"<!--.*?-->|`+[^`]*`+|\]\([^)\s]*\)|<[a-z/][^>]*>|\"[^\"\n]*\"|“[^”]*”", re.DOTALL
)
_RST = re.compile(r"``[^`]*``|`[^`]*`")
_SENTENCE = re.compile(r"(?:^|(?<=[.!?:|])\s+|\n\s*\n|(?<=\n)[*-] +)(?=[A-Z])")
_EACH = [
    (re.compile(pattern, re.IGNORECASE), advice)
    for advice, patterns in PATTERNS.items()
    for pattern in patterns
]
_FIRST = [(re.compile(pattern), advice) for pattern, advice in AT_START.items()]


@dataclass(frozen=True, slots=True)
class Finding:
    """One wording to change."""

    place: str
    line: int
    words: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.words!r}: {self.advice}"


def in_text(text: str, place: str, line: int = 1) -> Iterator[Finding]:
    """The findings in prose that starts at ``line`` of ``place``."""
    for pattern, advice in _EACH:
        for found in pattern.finditer(text):
            at = line + text.count("\n", 0, found.start())
            yield Finding(place, at, _around(text, found.start(), found.end()), advice)
    for start in (found.end() for found in _SENTENCE.finditer(text)):
        for pattern, advice in _FIRST:
            if begins := pattern.match(text, start):
                at = line + text.count("\n", 0, start)
                yield Finding(place, at, _around(text, start, begins.end()), advice)


def in_markdown(path: Path, place: str) -> Iterator[Finding]:
    """The findings in the prose of one page, and its lines that are too long."""
    text = prose(path.read_text())
    yield from in_text(text, place)
    is_generated = GENERATED in path.read_text()
    for number, line in enumerate(
        _blank(_WRITTEN, _blank(_FENCE, path.read_text())).split("\n"), 1
    ):
        if len(line) > WIDTH_MAX and not (is_generated and line.startswith("|")):
            yield Finding(place, number, f"{len(line)} characters", f"at most {WIDTH_MAX}")


def prose(text: str) -> str:
    """Markdown without fences, code, quotations, comments, tags and link targets, on the same
    lines."""
    return _blank(_HIDDEN, _blank(_FENCE, text))


def in_python(path: Path, place: str) -> Iterator[Finding]:
    """The findings in docstrings, comments and sentences of one module."""
    source = path.read_text()
    for line, text in (*sentences(source), *comments(source)):
        yield from in_text(_RST.sub(_masked, text), place, line)


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Each string literal of at least three words, with its line; docstrings among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if len(text.split()) >= 3:
                yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Each block of comments, with its first line."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield first, "\n".join(block)
            block = []
        if not block:
            first = token.start[0]
        last = token.start[0]
        text = token.string.lstrip("# ")
        block.append("" if text.startswith(("noqa", "type:", "fmt:")) else text)
    if block:
        yield first, "\n".join(block)


def has_verb(sentence: str) -> bool:
    """Whether a word of the sentence is a form of a verb."""
    return any(_is_verb(word) for word in re.findall(r"[a-z']+", sentence.lower()))


def _is_verb(word: str) -> bool:
    endings = (("s", ""), ("es", ""), ("ies", "y"), ("d", ""), ("ed", ""), ("ied", "y"))
    stems = [word.removesuffix(end) + instead for end, instead in endings if word.endswith(end)]
    doubled = [stem[:-1] for stem in stems if stem[-2:-1] == stem[-1:]]
    return word in _FORMS or not VERBS.isdisjoint([word, *stems, *doubled])


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Each paragraph of running text, with its first line: no headings, lists, tables or quotes."""
    line = 1
    for block in re.split(r"(\n\s*\n)", prose(markdown)):
        if block.strip() and not re.match(r"\s*([#|>*<_:-]|!!!|\d+\.)|    ", block):
            yield line, " ".join(block.split())
        line += block.count("\n")


def in_path(path: Path) -> Iterator[Finding]:
    """The findings in a file, or in all files below a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".md":
            yield from in_markdown(file, str(file))
        elif file.suffix == ".py":
            yield from in_python(file, str(file))


def _blank(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(_masked, text)


def _masked(found: re.Match[str]) -> str:
    """Something that is not prose, of as many lines."""
    return "_" + "\n" * found[0].count("\n")


def _around(text: str, start: int, end: int) -> str:
    return " ".join(text[max(0, start - 30) : end + 30].split())


def main(arguments: Iterable[str]) -> int:
    """Print the findings; 1 if there are any."""
    found = [finding for name in arguments for finding in in_path(Path(name))]
    found.sort(key=lambda finding: (finding.place, finding.line))
    for finding in found:
        print(finding)
    print(f"{len(found)} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
