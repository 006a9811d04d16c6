"""A Ray cluster of two workers on this machine, for as long as standard input is open.

Prints the address; `kill` on standard input ends the last worker with everything on it, without a farewell,
`behead` the head. Arguments are the workers' memory in MiB.
"""

import sys
from typing import Any

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

ROOM: dict[str, Any] = {"object_store_memory": 100 * 2**20}


def main() -> None:
    """Starts the cluster, and obeys."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "memory": 2**32, **ROOM})
    sizes = [int(size) * 2**20 for size in sys.argv[1:]]
    workers: list[Any] = [cluster.add_node(num_cpus=1, num_gpus=0, memory=size, **ROOM) for size in sizes]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)  # noqa: T201
    try:
        for line in sys.stdin:
            node = workers.pop() if line.strip() == "kill" else cluster.head_node
            cluster.remove_node(node, allow_graceful=False)
            print("killed", flush=True)  # noqa: T201
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
