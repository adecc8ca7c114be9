"""The examples in docs/settings.md: what stands in for what one machine does not have, and what differs between runs.

The second machine is a second rank on this one, the model that is split is the bundled one, and ports are free ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "settings.md"
EXAMPLE = "Example: "  # how their headings begin

sys.path.append(str(HERE / "ranks"))

from launching import free_ports  # noqa: E402  it is in the folder above

VARIES = (
    r"(?<=^49 others: )\d+|[\d.]+(?= MB more kept)"  # who was before whom
    r"|(?<=^draft ).*|.*(?=tokens a pass)|(?<=tokens a pass, ).*"  # how much is drafted, by the clock
    r"|(?<=memory )[\d.]+ MB"
)


def stand_ins() -> dict[str, str]:
    """By what they stand for."""
    launched = {
        f"mlx.launch {words}": f"mlx.launch -n 2 --starting-port {free_ports(1)[0]}"
        for words in ("-n 2", "--hostfile hosts.json")
    }
    hub = "--model mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"
    model = dict.fromkeys((hub, "--model MODEL"), "--model reference")
    return launched | model | {"--link-address mac-1": "--link-address 127.0.0.1"}
