"""Which address a config means, for either side."""

from pathlib import Path

from protocol.endpoint import local_endpoint
from shared.config.processes import LinkConfig, bind_address, dial_address


def test_one_machine_meets_at_the_run_directorys_own_socket(tmp_path: Path) -> None:
    link = LinkConfig()
    assert dial_address(link, tmp_path) == bind_address(link, tmp_path) == local_endpoint(tmp_path)
    assert dial_address(link, tmp_path).startswith("ipc://")
    assert dial_address(link, tmp_path) != dial_address(link, tmp_path / "another")


def test_a_tcp_endpoint_serves_both_sides(tmp_path: Path) -> None:
    link = LinkConfig(endpoint="tcp://learner:5757")
    assert dial_address(link, tmp_path) == bind_address(link, tmp_path) == "tcp://learner:5757"


def test_the_learner_may_listen_elsewhere_than_actors_dial(tmp_path: Path) -> None:
    link = LinkConfig(endpoint="tcp://learner:5757", bind="tcp://0.0.0.0:5757")
    assert dial_address(link, tmp_path) == "tcp://learner:5757"
    assert bind_address(link, tmp_path) == "tcp://0.0.0.0:5757"
