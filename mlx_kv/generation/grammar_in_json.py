"""A Lark grammar, for a text that stands within a string of JSON: the argument of a call.

What the grammar says of characters is said of their spellings: a new line is `\\n` there. Each character becomes a
lexeme, as in Lark's own Earley parser. No spelling is the beginning of another one, so that the library's lexer, which
takes the longest match and does not go back, cannot take too much.
"""

from __future__ import annotations

import json
import re

COMMON = {
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
# Characters that stand in a string of JSON as something else.
ESCAPES = {chr(code): json.dumps(chr(code))[1:-1] for code in [*range(0x20), ord('"'), ord("\\")]}
OTHERS = r'[^"\\\x00-\x1F]'
TEXT = r'"(?:\\.|[^"\\])*"'
PATTERN = r"/(?!/)(?:\\.|[^/\\])+/[a-z]*"
LARK = re.compile(
    rf"""(?P<comment>//[^\n]*|\#[^\n]*)
    | %import\s+common\s*(?:\.\s*(?P<one>[A-Z_]+)|\((?P<several>[A-Z_,\s]+)\))(?:\s*->\s*(?P<alias>\w+))?
    | %ignore(?P<ignored>(?:{TEXT}i?|{PATTERN}|[^\n"/])*)
    | (?P<unknown>%\w+)
    | (?P<first>{TEXT})\s*\.\.\s*(?P<last>{TEXT})
    | (?P<text>{TEXT})(?P<insensitive>i?)
    | /(?P<pattern>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)
    | ^[ \t]*(?P<defined>[!?]?_?[A-Za-z][\w-]*)(?:\.-?\d+)?[ \t]*:
    | (?P<name>_?[A-Za-z][\w-]*)""",
    re.VERBOSE | re.MULTILINE,
)
REGEX = re.compile(
    r"""(?P<character>(?:\[\^?\]?(?:\\.|[^\]\\])*\]|\\[wWdDsS]|\.)
        |\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^\dAbBpPuxzZ]|[^()|*+?{\\^$\[])
    | (?P<group>\((?:\?:|\?P?<\w+>)?(?!\?)) | (?P<repeat>[*+?]|\{\d*,?\d*\})\?? | [)|]""",
    re.VERBOSE | re.DOTALL,
)


def grammar_in_json(grammar: str) -> str:
    """A Lark grammar of what texts of a Lark grammar are within a string of JSON.

    Raises:
        ValueError: it has what is not known here, such as imports of other grammars, or patterns that look around.
    """
    ignored: list[str] = []
    in_rule = True

    def part(match: re.Match[str]) -> str:
        nonlocal in_rule
        if match["comment"]:
            return ""
        if match["unknown"]:
            raise ValueError(f"{match[0]} cannot be followed in the text of a call")
        if names := re.findall(r"\w+", match["one"] or match["several"] or ""):
            if unknown := sorted(set(names) - COMMON.keys()):
                raise ValueError(f"common.{unknown[0]} is not known: write what it is")
            return "\n".join(f"{_rule(match['alias'] or name)}: {_pattern(COMMON[name], '')}" for name in names)
        if match["ignored"] is not None:
            in_rule = False
            ignored.append(LARK.sub(part, match["ignored"]))
            return ""
        if match["defined"]:
            in_rule = _rule(match["defined"]) == match["defined"]
            return f"{_rule(match['defined'])}:" + (" ignored" if match["defined"] == "start" else "")
        if match["name"]:
            said = _rule(match["name"])
            if said == match["name"]:
                return said
        elif match["first"]:
            first, last = (re.escape(json.loads(match[end])) for end in ("first", "last"))
            said = _character(f"[{first}-{last}]", "")
        elif match["text"]:
            text = json.loads(match["text"], strict=False)
            said = " ".join(_literal(each, match["insensitive"]) for each in text) or '""'
        else:
            said = _pattern(match["pattern"].replace(r"\/", "/"), match["flags"])
        return f"({said} ignored)" if in_rule else f"({said})"

    rules = LARK.sub(part, grammar)
    return f"{rules}\nignored: " + (f"({' | '.join(ignored)})*" if ignored else '""') + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rule(name: str) -> str:
    """The rule for what a name of the grammar stands for: a terminal is one, as it has more than one lexeme."""
    return f"terminal-{name.lower()}" if name.lstrip("_")[:1].isupper() else name


def _pattern(pattern: str, flags: str) -> str:
    """What spells the texts of a regular expression."""
    if unknown := sorted(set(flags) - set("isu")):
        raise ValueError(f"the flag {unknown[0]} of /{pattern}/ is not known: leave it out")
    parts, place = [], 0
    while place < len(pattern):
        match = REGEX.match(pattern, place)
        if match is None:
            raise ValueError(f"{pattern[place : place + 8]!r} in /{pattern}/ cannot be followed in the text of a call")
        parts.append(
            _character(match["character"], flags)
            if match["character"]
            else "(" if match["group"] else match["repeat"] or match[0]
        )  # fmt: skip
        place = match.end()
    return " ".join(parts) or '""'


def _literal(character: str, flags: str) -> str:
    """What spells one character."""
    return _character(re.escape(character), flags) if flags else _quoted(ESCAPES.get(character, character))


def _character(character: str, flags: str) -> str:
    """What spells a character of those that a part of a regular expression describes."""
    python = re.compile(character, (re.IGNORECASE if "i" in flags else 0) | (re.DOTALL if "s" in flags else 0))
    spellings = [_quoted(spelling) for each, spelling in ESCAPES.items() if python.fullmatch(each)]
    if any(python.fullmatch(chr(code)) for code in range(0x20, 0x10000) if chr(code) not in ESCAPES):
        known = {".": r"[\s\S]" if "s" in flags else r"[^\n]"}
        inner = known.get(character) or (re.escape(character) if len(character) == 1 else character)
        inner = inner.replace(r"\/", "/").replace("/", r"\/")
        spellings.append(f"/{'(?i)' if 'i' in flags else ''}[{inner}&&{OTHERS}]/")
    return f"({' | '.join(spellings)})" if len(spellings) > 1 else spellings[0]
