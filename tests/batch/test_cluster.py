"""What a Ray cluster must have before anything starts; no cluster is needed here."""

from __future__ import annotations

from typing import Any

import pytest

from rewriter.batch.cluster import check_resources
from rewriter.ir.errors import UsageError

GPUS = {"CPU": 2.0, "GPU": 1.0, "accelerator_type:L4": 1.0}


@pytest.mark.parametrize(
    ("resources", "wanted", "message"),
    [
        ({"memory": 4e9}, {}, "no machine of the cluster has a CPU for tasks"),
        ({"CPU": 2.0}, {"gpus": 0.5}, "the cluster has 0, and each model reserves 0.5"),
        (GPUS, {"gpus": 2.0}, "the cluster has 1, and each model reserves 2"),
        (GPUS, {"verify_on": ["H100"]}, "the cluster has no H100: it has L4"),
        ({"CPU": 1.0}, {"verify_on": ["H100"]}, "it reports no types of GPU"),
    ],
    ids=["no worker", "no GPU", "too few GPUs", "another type", "no types"],
)
def test_what_ray_would_wait_for_is_an_error(
    resources: dict[str, float], wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_resources(resources, **{"gpus": 0.0, "verify_on": [], **wanted})


def test_a_cluster_with_everything_is_accepted() -> None:
    check_resources(GPUS, gpus=1.0, verify_on=["L4"])
