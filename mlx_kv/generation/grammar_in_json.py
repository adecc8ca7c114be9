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
# Texts and patterns may lack their end, so that each is looked through once.
TEXT = r'"(?:\\.|[^"\\])*"?'
LARK = re.compile(
    rf"""(?P<comment>//[^\n]*|\#[^\n]*)
    | %import\s+common\s*(?:\.\s*(?P<one>[A-Z_]+)|\((?P<several>[A-Z_,\s]+)\))(?:\s*->\s*(?P<alias>\w+))?
    | (?P<ignore>%ignore\b)
    | (?P<unknown>%\w*)
    | (?P<text>{TEXT})(?:\s*\.\.\s*(?P<last>{TEXT})|(?P<insensitive>i?))
    | /(?P<pattern>(?:\\.|[^/\\])+)(?P<closed>/?)(?P<flags>[a-z]*)
    | ^[ \t]*(?P<defined>[!?]?_?[A-Za-z][\w-]*)(?:\.-?\d+)?[ \t]*:
    | (?P<name>_?[A-Za-z][\w-]*)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
REGEX = re.compile(
    r"""(?P<character>(?:\[\^?\]?(?:\\.|[^\]\\])*\]|\\[wWdDsS]|\.)
        |\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^\dAbBpPuxzZ]|[^()|*+?{\\^$\[])
    | (?P<group>\((?:\?:|\?P?<\w+>)?(?!\?)) | (?P<repeat>[*+?]|\{\d*,?\d*\})\?? | [)|]""",
    re.VERBOSE | re.DOTALL,
)
Characters = dict[tuple[str, str], tuple[str, str]]  # rules of parts of patterns with flags: names, what they say


def grammar_in_json(grammar: str) -> str:
    """A Lark grammar of what texts of a Lark grammar are within a string of JSON.

    Raises:
        ValueError: it has what is not known here, such as imports of other grammars, or patterns that look around.
    """
    characters: Characters = {}
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
            return "\n".join(
                f"{_rule(match['alias'] or name)}: {_pattern(COMMON[name], '', characters)}" for name in names
            )
        if match["ignore"]:
            in_rule = False
            ignored.append(f"ignored-{len(ignored)}")
            return f"{ignored[-1]}:"
        if match["defined"]:
            in_rule = _rule(match["defined"]) == match["defined"]
            return f"{_rule(match['defined'])}:" + (" ignored" if match["defined"] == "start" else "")
        if match["name"]:
            said = _rule(match["name"])
            if said == match["name"]:
                return said
        elif match["last"]:
            first, last = (re.escape(json.loads(match[end])) for end in ("text", "last"))
            said = _character(f"[{first}-{last}]", "", characters)
        elif match["text"]:
            text, flags = json.loads(match["text"], strict=False), match["insensitive"]
            said = " ".join(_character(re.escape(each), flags, characters) for each in text) or '""'
        elif match["closed"]:
            said = _pattern(match["pattern"].replace(r"\/", "/"), match["flags"], characters)
        else:
            raise ValueError("a pattern has no end: close it with /")
        return f"(({said}) ignored)" if in_rule else f"({said})"

    rules = [LARK.sub(part, grammar), "ignored: " + (f"({' | '.join(ignored)})*" if ignored else '""')]
    return "\n".join([*rules, *(f"{name}: {said}" for name, said in characters.values())]) + "\n"


def literal(text: str) -> str:
    """A text, in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _rule(name: str) -> str:
    """The rule for what a name of the grammar stands for: a terminal is one, as it has more than one lexeme."""
    return f"terminal-{name.lower()}" if name.lstrip("_")[:1].isupper() else name


def _pattern(pattern: str, flags: str, characters: Characters) -> str:
    """What spells the texts of a regular expression."""
    if unknown := sorted(set(flags) - set("isu")):
        raise ValueError(f"the flag {unknown[0]} of /{pattern}/ is not known: leave it out")
    parts, place = [], 0
    while place < len(pattern):
        match = REGEX.match(pattern, place)
        if match is None:
            raise ValueError(f"{pattern[place : place + 8]!r} in /{pattern}/ cannot be followed in the text of a call")
        if match["character"]:
            parts.append(_character(match["character"], flags, characters))
        else:  # the texts are the same, whatever a group is called and whether a repetition prefers few
            parts.append("(" if match["group"] else match["repeat"] or match[0])
        place = match.end()
    return " ".join(parts) or '""'


def _character(character: str, flags: str, characters: Characters) -> str:
    """The rule of what spells one character, of those that a part of a regular expression describes."""
    if (character, flags) not in characters:
        characters[character, flags] = f"character-{len(characters)}", _spellings(character, flags)
    return characters[character, flags][0]


def _spellings(character: str, flags: str) -> str:
    try:
        python = re.compile(character, (re.IGNORECASE if "i" in flags else 0) | (re.DOTALL if "s" in flags else 0))
    except re.error as error:
        raise ValueError(f"{character!r} cannot be followed in the text of a call: {error}") from None
    spellings = [literal(spelling) for each, spelling in ESCAPES.items() if python.fullmatch(each)]
    if character.removeprefix("\\") not in ESCAPES:
        any_character = r"[\s\S]" if "s" in flags else r"[^\n]"
        inner = re.escape(character) if len(character) == 1 else character
        inner = any_character if character == "." else inner.replace(r"\/", "/").replace("/", r"\/")
        spellings.append(f"/{'(?i)' if 'i' in flags else ''}[{inner}&&{OTHERS}]/")
    return " | ".join(spellings)
