"""Processes that mpirun, srun and torchrun have started: by their variables, and what becomes of a
configuration in them."""

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.errors import UserError
from lmi_core.settings.job import Job, job_of, without_job

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
}


@pytest.mark.parametrize(
    ("environ", "started_by", "rank", "size"),
    [
        (OPEN_MPI, "mpirun", 3, 4),
        (HYDRA, "mpirun", 0, 2),
        (TORCHRUN, "torchrun", 1, 2),
        (SLURM, "srun", 1, 2),
        # What starts within srun's processes counts.
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2", **TORCHRUN}, "torchrun", 1, 2),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **HYDRA}, "mpirun", 0, 2),
        ({**SLURM, "PMI_SIZE": "2", "PMI_RANK": "1"}, "srun", 1, 2),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpirun", 1, 2),
    ],
)
def test_a_process_knows_its_place(environ, started_by, rank, size):
    job = job_of(environ)
    assert (job.started_by, job.rank, job.size, job.is_spread) == (started_by, rank, size, False)
    again = job_of(environ)
    assert again == job
    assert job.name


@pytest.mark.parametrize("key", ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
def test_jobs_have_names_of_their_own(key):
    unnamed = {name: text for name, text in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    names = {job_of({**unnamed, key: text}).name for text in "ab"}
    assert len(names | {job_of(unnamed).name}) == 3
    restarted = job_of({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted.name != job_of(TORCHRUN).name


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        # Others than torchrun say these as well, and a batch script is one process.
        {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
        {"WORLD_SIZE": "2", "RANK": "-1", "LOCAL_RANK": "-1"},
        {**TORCHRUN, "WORLD_SIZE": "", "RANK": " "},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "77"},
        {**SLURM, "SLURM_STEP_NUM_NODES": "2"},  # a server on each machine
        without_job({**SLURM, **OPEN_MPI, **TORCHRUN}),
    ],
)
def test_who_is_alone(environ):
    assert job_of(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**HYDRA, "PMI_RANK": "2"}, "PMI_RANK='2' is not a number from 0 to 1"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number from 1"),
    ],
)
def test_variables_that_cannot_be(environ, words):
    with pytest.raises(UserError, match=words):
        job_of(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"},
        {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_ranks_on_several_machines_are_refused_with_what_serves_there(environ, explained):
    job = job_of(environ)
    assert job.is_spread
    ways = ("a server on each machine", "option.on=ray", "option.rolling_batch=vllm")
    for way in (*ways, f"env -u {job.said_by} lmi serve"):
        assert way in job.objection
    [error] = placed(explained, job, "option.device=cpu").errors
    assert "on several machines, and the lmi engine's ranks share memory" in str(error)


def placed(explained, job, *written, **sizes):
    from tests.config.test_placement import host

    options = [part for text in written for part in ("-o", text.removeprefix("option."))]
    return explained(str(MODEL_DIR), *options, host=host(job=job, **sizes))


TWO = Job(started_by="torchrun", rank=0, size=2, name="x")


@pytest.mark.parametrize("written", [(), ("tensor_parallel_degree=2",), ("mpi_mode=true",)])
def test_the_processes_are_the_ranks(explained, written):
    report = placed(explained, TWO, "device=cpu", *written)
    assert not report.problems
    [model] = report.models
    assert (model.placement.tensor_parallel_degree, model.engine.config.job) == (2, TWO)
    assert model.num_processes == 1
    assert model.placement.describe().startswith("the CPU by 2 ranks in torchrun's processes")
    assert "job" not in model.engine.shown()


def test_without_a_job_mpi_mode_starts_the_ranks_itself(explained):
    report = placed(explained, None, "device=cpu", "mpi_mode=true", "tensor_parallel_degree=4")
    assert not report.problems
    config = report.models[0].engine.config
    assert (config.tensor_parallel_degree, config.job) == (4, None)


@pytest.mark.parametrize(
    ("written", "sizes", "words"),
    [
        (["device=cpu", "tensor_parallel_degree=4"], {}, "write 2, or nothing, or start 4"),
        (["device=cpu", "on=ray"], {}, "Ray starts those of option.on=ray itself"),
        (["rolling_batch=vllm"], {"packages": {"vllm"}}, "vLLM takes no ranks from it"),
        (["device=cuda"], {"num_gpus": 1}, "the lmi engine on cuda takes no ranks from it"),
    ],
)
def test_what_does_not_go_with_processes_of_a_job(explained, written, sizes, words):
    report = placed(explained, TWO, *written, **sizes)
    assert any(words in str(error) for error in report.errors), report.errors
