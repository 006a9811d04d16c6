"""A Ray cluster of two workers on this machine, for as long as standard input is open.

Prints the address; `kill` on standard input ends one worker with everything on it, without a farewell.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

ROOM: dict[str, Any] = {"object_store_memory": 100 * 2**20, "memory": 4 * 2**30}


def main() -> None:
    """Starts the cluster, and obeys."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **ROOM})
    workers: list[Any] = [cluster.add_node(num_cpus=1, num_gpus=0, **ROOM) for _ in range(2)]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)  # noqa: T201
    try:
        for line in sys.stdin:
            if line.strip() == "kill":
                cluster.remove_node(workers.pop(), allow_graceful=False)
                print("killed", flush=True)  # noqa: T201
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
