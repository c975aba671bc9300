"""Ranks are a pure function of the environment: which source is taken, and what is refused."""

import pytest

from meshwork.config import ConfigError
from meshwork.ranks import NAMES, Ranks, first_host, ranks_from

pytestmark = pytest.mark.quick

FIVE = {
    "RANK": "3",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29611",
}
TORCHRUN = FIVE | {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
}
SLURM_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[003-005,9],login1",
    "SLURM_TASKS_PER_NODE": "8",
}
SLURM_STEP = SLURM_JOB | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_NODELIST": "gpu[003-005,9],login1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_no_variables_are_one_process():
    assert ranks_from({}) == Ranks(0, 0, 1, 1, 0, "one process", None, 0)


def test_torchruns_variables_are_taken():
    assert ranks_from(TORCHRUN) == Ranks(3, 1, 6, 2, 1, "torchrun", ("10.0.0.1", 29611), 2)


def test_torchrun_wins_over_a_slurm_step():
    assert ranks_from(SLURM_STEP | TORCHRUN).source == "torchrun"
    assert ranks_from(SLURM_STEP | TORCHRUN).world_size == 6


def test_a_slurm_step_is_taken_with_its_first_host_and_the_tasks_of_its_node():
    ranks = ranks_from(SLURM_STEP)
    assert (ranks.rank, ranks.local_rank, ranks.world_size) == (9, 1, 11)
    assert (ranks.local_world_size, ranks.node_rank) == (3, 2)
    assert ranks.source == "a Slurm step"
    assert ranks.master == ("gpu003", 15000 + (77 * 131 + 3) % 17000)


def test_every_rank_of_a_slurm_step_meets_at_one_address_and_two_steps_at_two():
    first = [ranks_from(SLURM_STEP | {"SLURM_PROCID": str(r)}).master for r in range(8, 11)]
    assert len(set(first)) == 1
    assert ranks_from(SLURM_STEP | {"SLURM_STEP_ID": "4"}).master != first[0]


def test_a_slurm_step_wins_over_hand_exported_variables():
    assert ranks_from(FIVE | SLURM_STEP).source == "a Slurm step"


@pytest.mark.parametrize(
    ("node", "tasks"), [("0", 4), ("1", 4), ("2", 3)], ids=["first", "repeated", "last"]
)
def test_compressed_task_counts_give_each_node_its_own(node, tasks):
    assert ranks_from(SLURM_STEP | {"SLURM_NODEID": node}).local_world_size == tasks


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[003-005,9],login1", "gpu003"),
        ("gpu[7,9-12]", "gpu7"),
        ("login1,gpu[003-005]", "login1"),
        ("node-a", "node-a"),
        ("rack[1-2]-ib,x", "rack1-ib"),
        ("n1.cluster.org,n2.cluster.org", "n1.cluster.org"),
    ],
)
def test_the_first_host_of_a_compressed_list(nodelist, host):
    assert first_host(nodelist) == host


def test_the_variables_of_a_slurm_job_without_a_step_do_not_count():
    assert ranks_from(SLURM_JOB) == Ranks()


def test_the_variables_of_mpi_alone_do_not_count():
    mpi = {"PMI_SIZE": "4", "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4"}
    assert ranks_from(mpi) == Ranks()


def test_a_step_of_one_task_is_one_process_and_hides_no_exported_variables():
    shell = SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1"}
    assert ranks_from(shell) == Ranks()
    assert ranks_from(shell | FIVE).source == "hand-exported variables"


def test_hand_exported_variables_leave_the_node_open():
    ranks = ranks_from(FIVE)
    assert ranks == Ranks(3, 1, 6, None, None, "hand-exported variables", ("10.0.0.1", 29611), 0)


def test_world_size_one_may_be_exported_by_hand():
    ranks = ranks_from(FIVE | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    assert (ranks.world_size, ranks.master) == (1, ("10.0.0.1", 29611))


def sentence(env) -> str:
    with pytest.raises(ConfigError) as e:
        ranks_from(env)
    assert len(e.value.problems) == 1
    return str(e.value)


@pytest.mark.parametrize(
    "given", [("RANK",), ("LOCAL_RANK",), ("RANK", "LOCAL_RANK", "MASTER_ADDR")]
)
def test_half_a_set_names_every_variable_with_its_value(given):
    said = sentence({n: FIVE[n] for n in given})
    for name in NAMES:
        if name in given:
            assert f"{name}={FIVE[name]}" in said
            assert f" {name} is missing" not in said
        else:
            assert f" {name} is missing" in said
            assert f"{name} (unset)" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "6"}, "0 <= RANK < WORLD_SIZE does not hold"),
        ({"RANK": "-1"}, "0 <= RANK < WORLD_SIZE does not hold"),
        ({"LOCAL_RANK": "6"}, "0 <= LOCAL_RANK < WORLD_SIZE does not hold"),
        ({"WORLD_SIZE": "0"}, "0 <= RANK < WORLD_SIZE does not hold"),
        ({"RANK": "a"}, "RANK is no number"),
        ({"RANK": "1.0"}, "RANK is no number"),
        ({"RANK": ""}, "RANK is missing"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is missing"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is no number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is not between 1 and 65535"),
    ],
)
@pytest.mark.parametrize("source", [FIVE, TORCHRUN], ids=["by hand", "torchrun"])
def test_a_value_out_of_range_is_named_with_all_five(source, change, words):
    env = source | change
    said = sentence(env)
    assert words in said
    assert all(f"{n}={env[n]}" in said for n in NAMES)


def test_several_wrong_values_are_said_in_one_sentence():
    said = sentence(FIVE | {"RANK": "9", "LOCAL_RANK": "x", "MASTER_PORT": "0"})
    for words in (
        "0 <= RANK < WORLD_SIZE",
        "LOCAL_RANK is no number",
        "MASTER_PORT is not between",
    ):
        assert words in said


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NODEID": "3"},
        {"SLURM_NODEID": "x"},
        {"SLURM_STEP_TASKS_PER_NODE": "many"},
        {"SLURM_STEP_NUM_TASKS": "a"},
        {"SLURM_PROCID": "11"},
    ],
)
def test_a_slurm_step_out_of_range_is_refused(change):
    said = sentence(SLURM_STEP | change)
    assert said.startswith("ranks from a Slurm step: ")
    assert next(iter(change.values())) in said


def test_half_a_slurm_step_names_what_is_missing():
    env = {k: v for k, v in SLURM_STEP.items() if k not in ("SLURM_LOCALID", "SLURM_STEP_NODELIST")}
    said = sentence(env)
    assert "SLURM_LOCALID, SLURM_STEP_NODELIST missing" in said
    assert "SLURM_PROCID=9" in said
