"""`python -m tests.support.ray_nodes NODES`: a Ray cluster on this machine, until stdin is closed.

A head without CPUs, to which the launcher connects, and so many nodes with one CPU. Each node is what it would be on a
machine of its own: a raylet that starts workers. Prints one line of JSON, `{"address": ..., "raylets": [pid, ...]}`,
when all of them are there. They have small object stores, no dashboard, and send no usage statistics.
"""

import json
import os
import select
import shutil
import sys
import tempfile

REAP_EVERY_S = 0.2
STORE_BYTES = 100 * 2**20
GIVEN_UP = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
"""A dead node is given up after 3 s instead of 15."""


def main(nodes: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    # The paths of Ray's sockets are short only below a short folder. Ray also notes there which cluster of this machine
    # is the newest: its usual folder may not exist, or may belong to another cluster.
    folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray")
    os.mkdir(os.path.join(folder, "ray"))
    size = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    head = {"num_cpus": 0, "temp_dir": os.path.join(folder, "ray"), "_system_config": GIVEN_UP, **size}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        added = [cluster.add_node(num_cpus=1, **size) for _ in range(nodes)]
        raylets = [node.all_processes["raylet"][0].process for node in added]
        print(json.dumps({"address": cluster.address, "raylets": [raylet.pid for raylet in raylets]}), flush=True)
        while not select.select([sys.stdin], [], [], REAP_EVERY_S)[0]:
            # A worker asks whether its raylet lives, and a zombie would pass for one that does.
            for raylet in raylets:
                raylet.poll()
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
