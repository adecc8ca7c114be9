"""Facts and turns of chats, in several languages, that are put between other texts."""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = "Ivan Nora Oscar Paula Rita Stefan Tina Victor Wanda Yara Bruno Clara Felix Greta Hugo Ines".split()
THINGS = "ladder kettle violet hammer lantern carpet mirror ribbon turtle walnut barrel anchor compass blanket".split()
TOWNS = "Porto Turin Lyon Hamburg Krakow Seville Geneva Bergen Tampere Osaka Manila Jakarta Austin Perth".split()
CODES = "KX-41 BR-77 TL-09 QZ-58 MV-63 HD-26 WN-14 PF-90 CJ-35 SG-82".split()

Fact = Callable[[random.Random], str]

FACTS: tuple[Fact, ...] = (
    lambda r: f"{r.choice(NAMES)} moved to {r.choice(TOWNS)} in {r.randint(1900, 2020)}.",
    lambda r: f"The {r.choice(THINGS)} of {r.choice(NAMES)} is in {r.choice(TOWNS)}.",
    lambda r: f"{r.choice(NAMES)} bought a {r.choice(THINGS)} for {r.randint(2, 900)} dollars.",
    lambda r: f"The parcel {r.choice(CODES)} weighs {r.randint(2, 80)} kilograms and belongs to {r.choice(NAMES)}.",
    lambda r: f"The train to {r.choice(TOWNS)} leaves from platform {r.randint(1, 24)} at {r.randint(5, 22)}:40.",
    lambda r: f"{r.choice(NAMES)} is {r.randint(19, 80)} years old and repairs every {r.choice(THINGS)}.",
    lambda r: f"{r.choice(NAMES)} wohnt seit {r.randint(1960, 2020)} in {r.choice(TOWNS)}.",
    lambda r: f"{r.choice(NAMES)} a payé {r.randint(3, 400)} euros pour le colis {r.choice(CODES)}.",
    lambda r: f"{r.choice(NAMES)} trabaja en {r.choice(TOWNS)} y tiene {r.randint(2, 9)} hermanos.",
    lambda r: f"{r.choice(NAMES)}的房间号是{r.randint(101, 999)}，明天去{r.choice(TOWNS)}。",  # noqa: RUF001
)
TURNS = (
    *("Tell me more.", "And then?", "What else is there?", "Please go on.", "Interesting. What happened next?"),
    *("Erzähl bitte weiter.", "Et ensuite ?", "¿Y qué más?", "请继续。", "Could you explain that in more detail?"),
)
THANKS = (
    *("Thank you, I have noted it.", "Noted.", "Danke, das habe ich notiert.", "Merci, c'est noté."),
    "好的，记住了。",  # noqa: RUF001
)
INSTRUCTIONS = (
    *("Read the following text.\n\n", "Here is a document. I will have questions about it later.\n\n"),
    *("Bitte lies den folgenden Text.\n\n", "Voici un texte à lire.\n\n"),
)


def fact(r: random.Random) -> str:
    """A sentence that no other sentence of a text implies."""
    return r.choice(FACTS)(r)
