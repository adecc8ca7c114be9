"""What 2, 4 and 8 machines would give for a model that is too large for one: a table from bytes, not a measurement.

    python benchmarks/cluster_table.py [--context 32768] [--bits 4.5]

Decoding one sequence is bound by what must be read and what must be told. A rank reads its part of the weights (W bytes
in all) and of keys and values (C bytes) with the bandwidth of its memory, M. What ranks tell each other for a token is
what `benchmarks/ranks.py` counts, on models that run here: with heads split two sums of a hidden state (h bytes) a
layer, L layers, and with layers split one hidden state handed on from each of the n ranks to the next and one gathered;
and one more sum of 4 bytes that makes all ranks say the leader's token. A sum over n ranks takes a latency, and moves
2 (n - 1) / n of its bytes over a link.

    heads:  (W + C) / (n M) + 2 L (latency + 2 (n - 1) / n * h / link) + latency
    layers: (W + C) / M + (n - 1) (latency + h / link) + 2 latency

Layers split give no speed to one sequence, but room: each machine holds an n-th. These are bounds: nothing reaches the
bandwidth of its memory, and attention, norms and sampling are not in it.

The model: 70.6 billion parameters, 80 layers, hidden 8192, 8 KV heads of 128 (the shape of Llama 3.3 70B). Memory and
links are what makers say; latencies are what others have measured for a small sum: 10 GbE by TCP 100 us; Thunderbolt 5
by TCP 300 us, by RDMA (JACCL) 9 us at 12 GB/s; NCCL over NVLink 15 us. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

PARAMETERS, LAYERS, HIDDEN, KV_HEADS, HEAD_DIM = 70.6e9, 80, 8192, 8, 128
MICROSECOND, GB = 1e-6, 1e9


@dataclass(frozen=True)
class Cluster:
    """Machines and what is between them."""

    name: str
    memory: float  # bytes per second that one machine reads
    latency: float  # seconds of a sum of a few bytes
    link: float  # bytes per second


CLUSTERS = (
    Cluster("M3 Ultra, 10 GbE (ring)", 819 * GB, 100 * MICROSECOND, 1.25 * GB),
    Cluster("M3 Ultra, Thunderbolt 5 (ring)", 819 * GB, 300 * MICROSECOND, 4 * GB),
    Cluster("M3 Ultra, Thunderbolt 5 (JACCL)", 819 * GB, 9 * MICROSECOND, 12 * GB),
    Cluster("H100, NVLink (NCCL)", 3350 * GB, 15 * MICROSECOND, 450 * GB),
)


def told_by_heads(layers: int, state: float) -> tuple[int, float]:
    """Collectives a token, and the bytes that they are about, with heads split; `state` is the bytes of one token's."""
    return 2 * layers + 1, 2 * layers * state + 4


def seconds_by_heads(cluster: Cluster, ranks: int, read: float, state: float) -> float:
    collectives, told = told_by_heads(LAYERS, state)
    return read / ranks / cluster.memory + collectives * cluster.latency + 2 * (ranks - 1) / ranks * told / cluster.link


def seconds_by_layers(cluster: Cluster, ranks: int, read: float, state: float) -> float:
    hops = ranks - 1
    return read / cluster.memory + hops * (cluster.latency + state / cluster.link) + 2 * cluster.latency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768, help="tokens that keys and values are held of")
    parser.add_argument("--bits", type=float, default=4.5, help="of a weight, with its share of scales")
    given = parser.parse_args()
    weights = PARAMETERS * given.bits / 8
    held = given.context * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2.0
    state, read = HIDDEN * 2.0, weights + held
    print(f"{weights / GB:.1f} GB of weights, {held / GB:.1f} GB of keys and values for {given.context:,} tokens")
    print(f"{'tokens/s, at most':42}" + "".join(f"{n:>9}" for n in (1, 2, 4, 8)))
    line: dict[str, object] = {"benchmark": "cluster_table", "weights": weights, "keys_and_values": held}
    for cluster in CLUSTERS:
        alone = cluster.memory / read
        for split, seconds in (("heads", seconds_by_heads), ("layers", seconds_by_layers)):
            speeds = [alone, *(1 / seconds(cluster, ranks, read, state) for ranks in (2, 4, 8))]
            print(f"{cluster.name + ', ' + split:42}" + "".join(f"{speed:9.1f}" for speed in speeds))
            line[f"{cluster.name}, {split}"] = [round(speed, 1) for speed in speeds]
    parts = [read / ranks / GB for ranks in (1, 2, 4, 8)]
    print(f"{'GB on each machine':42}" + "".join(f"{part:9.1f}" for part in parts))
    line["gb_each"] = [round(part, 1) for part in parts]
    sys.stdout.flush()
    print(json.dumps(line))


if __name__ == "__main__":
    main()
