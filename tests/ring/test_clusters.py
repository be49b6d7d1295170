"""Runs the programs and batch scripts of docs/clusters.md with real Slurm, Open MPI, MPICH, Ray and Lightning.

A test skips if its launcher is not installed, unless the environment variable RING_BACKENDS_NEEDS_CLUSTERS names it. In
`tox run -e clusters` it is "accelerate,deepspeed,lightning,ray". `.ci/run` adds "slurm", "openmpi" and "mpich" where
they are installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from command_line import ROOT, environment, output_of, start
from slurm_cluster import NoSlurmError, SlurmCluster
from test_launcher import POD

PAGES = ROOT / "docs"
NEEDED = os.environ.get("RING_BACKENDS_NEEDS_CLUSTERS", "").split(",")

pytestmark = [
    pytest.mark.matrix(reason="starts daemons, and the processes of programs"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PAGES.is_dir(), reason="this tree has no docs/"),
]


def skip_without(launcher: str, reason: str) -> None:
    if launcher in NEEDED:
        pytest.fail(f"RING_BACKENDS_NEEDS_CLUSTERS names {launcher}, but {reason}")
    pytest.skip(reason)


def needs(library: str) -> None:
    if find_spec(library) is None:
        skip_without(library, f"{library} is not installed.")


def code(page: str, name: str) -> str:
    """The code block of a page whose first or second line has this file name."""
    text = (PAGES / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if re.match(rf"(#![^\n]*\n)?# {re.escape(name)};", block)]
    assert len(blocks) == 1, name
    return blocks[0]


def changed(text: str, *changes: tuple[str, str]) -> str:
    """The text with replacements, each of which must apply."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def check_ring_output(output: str) -> None:
    """Compare what ring.py printed on a ring of two with what its page shows."""
    shown = re.findall(
        r"^rank \d of 2 .*(?=;)", (PAGES / "getting-started.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(shown) == 2
    lines = sorted(line for line in output.splitlines() if line.startswith("rank "))
    assert [line.partition(";")[0] for line in lines] == shown, output
    for line in lines:
        assert float(line.split()[-1]) < 1e-5, line


@pytest.fixture(scope="module")
def slurm():
    try:
        cluster = SlurmCluster()
        cluster.__enter__()
    except NoSlurmError as error:
        skip_without("slurm", str(error))
    try:
        yield cluster
    finally:
        cluster.__exit__()


ONE_NODE = [("#SBATCH --nodes=2\n", "#SBATCH --nodes=1\n"), ("#SBATCH --gpus-per-node=4\n", "")]


class Job:
    """A batch script of docs/clusters.md, submitted in a folder that holds ring.py."""

    def __init__(self, slurm: SlurmCluster, folder: Path, script: str) -> None:
        self._slurm, self.output_file = slurm, folder / "output"
        (folder / "ring.py").write_text(code("getting-started.md", "ring.py"))
        (folder / "job.sbatch").write_text(script)
        # The programs `python`, `torchrun` and `ring-backends` of the environment that runs this test.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        submitted = subprocess.run(
            ["sbatch", "--parsable", f"--output={self.output_file}", "job.sbatch"],
            cwd=folder,
            env=environment(**slurm.environment, PATH=path),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert submitted.returncode == 0, submitted.stderr
        self.id = submitted.stdout.strip()

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace") if self.output_file.exists() else ""

    @property
    def properties(self) -> dict[str, str]:
        shown = self._slurm.run("scontrol", "show", "job", self.id)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, timeout: float) -> str:
        """Wait until the job has completed. Returns its output."""
        deadline, is_hastened = time.monotonic() + timeout, False
        while (state := self.properties["JobState"]) in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"{self.properties}\n{self.output}"
            if state == "PENDING" and self.properties["Reason"] == "BeginTime" and not is_hastened:
                # Slurm delays a requeued job by 2 min. In the second of the requeue, the node refuses to start the job.
                self._slurm.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+5seconds")
                is_hastened = True
            time.sleep(0.5)
        assert state == "COMPLETED", f"{state}\n{self.output}\n{self._slurm.log}"
        return self.output


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("ring.sbatch", [("--ntasks-per-node=4", "--ntasks-per-node=2")]),
        ("torchrun.sbatch", [("--nproc-per-node 4", "--nproc-per-node 2")]),
    ],
)
def test_slurm(slurm, tmp_path, script, changes):
    job = Job(slurm, tmp_path, changed(code("clusters.md", script), *ONE_NODE, *changes))
    check_ring_output(job.wait(240))


def rank_processes(slurm: SlurmCluster, rank: int) -> list[int]:
    """The processes of a task that srun has started in this cluster."""
    wanted = {f"SLURM_CONF={slurm.environment['SLURM_CONF']}", f"SLURM_PROCID={rank}", "SLURM_STEP_NUM_TASKS=2"}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((folder / "environ").read_bytes().decode(errors="replace").split("\0")):
                found.append(int(folder.name))
    return found


def test_slurm_restarts_a_job_whose_rank_is_killed(slurm, tmp_path):
    script = changed(
        code("clusters.md", "train.sbatch"),
        *ONE_NODE,
        ("--ntasks-per-node=4", "--ntasks-per-node=2"),
        ("--save-every 100", "--save-every 5"),
        ("--steps 1000", "--steps 100 --seq-len 256 --timeout 60 --json run.json"),
    )
    job = Job(slurm, tmp_path, script)
    deadline = time.monotonic() + 240
    while not (tmp_path / "run.pt").exists():
        assert time.monotonic() < deadline, job.output
        time.sleep(0.05)
    killed = rank_processes(slurm, 1)
    assert killed, job.output
    for process in killed:
        os.kill(process, signal.SIGKILL)
    output = job.wait(300)
    assert job.properties["Restarts"] == "1"
    assert re.search(r"srun: error: .*task 1: Killed", output)
    assert "RingPeerError" in output
    steps = json.loads((tmp_path / "run.json").read_text())["steps"]
    assert [steps[-1]["step"], steps[0]["step"] > 1] == [100, True]  # the first steps were those of the first run

    alone = changed(script, ("--ntasks-per-node=2", "--ntasks-per-node=1"), ("--steps 100", "--steps 103"))
    Job(slurm, tmp_path, alone).wait(240)
    steps = json.loads((tmp_path / "run.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [101, 102, 103]


def test_pytorchjob(tmp_path):
    """Two pods of a PyTorchJob without torchrun. 127.0.0.2 stands for the address of the first pod."""
    (tmp_path / "ring.py").write_text(code("getting-started.md", "ring.py"))
    world = {**POD, "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": "23457", "PET_NNODES": "2", "WORLD_SIZE": "2"}
    pods = [
        start(["ring.py"], tmp_path, environment(**{**world, "RANK": str(rank), "PET_NODE_RANK": str(rank)}))
        for rank in range(2)
    ]
    outputs = [pod.communicate(timeout=420) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    check_ring_output("".join(printed for printed, _ in outputs))


def mpi_launcher(name: str) -> str:
    """The program that starts processes for the MPI of this name, with options that every test needs."""
    programs, says, package, options = {
        "openmpi": (("mpirun.openmpi", "mpirun"), "Open MPI", "openmpi-bin", "--allow-run-as-root --oversubscribe"),
        "mpich": (("mpiexec.hydra",), "HYDRA", "mpich", ""),
    }[name]
    for program in filter(None, map(shutil.which, programs)):
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
        if says in version:
            return f"{program} {options}"
    skip_without(name, f"{name} is not installed (Debian: {package}).")
    raise AssertionError


def of_command(command: str, folder: Path) -> str:
    """The output of a command, which must succeed. It finds the programs of the folder, and of this environment."""
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    # mpirun ends its processes after SIGTERM, but not after the SIGKILL of subprocess.run.
    words = ["timeout", "240", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, env=environment(PATH=path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("mpi", "port"), [("openmpi", ""), ("mpich", "-genv MASTER_PORT 23458")])
def test_mpi(tmp_path, mpi, port):
    start_two = f"{mpi_launcher(mpi)} {port} -n 2"
    (tmp_path / "ring.py").write_text(code("getting-started.md", "ring.py"))
    check_ring_output(of_command(f"{start_two} python ring.py", tmp_path))
    options = "--seq-len 256 --steps 4 --save run.pt --json run.json --timeout 60"
    output = of_command(f"{start_two} ring-backends train {options}", tmp_path)
    assert output.count("native adapter, 1 ring of 2,") == 1, output
    assert len(json.loads((tmp_path / "run.json").read_text())["bytes_sent"]) == 2


def test_deepspeed_with_openmpi(tmp_path):
    needs("deepspeed")
    program, options = mpi_launcher("openmpi").split(" ", 1)
    (tmp_path / "mpirun").symlink_to(program)  # DeepSpeed calls it by this name
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    source = code("getting-started.md", "ring.py")
    (tmp_path / "ring.py").write_text(changed(source, ("import native as backend", "import deepspeed as backend")))
    one_host = "--force_multi --no_ssh_check --hostfile hosts --master_addr 127.0.0.1"
    to_mpirun = shlex.quote(f"{options} --mca btl_tcp_if_include lo")
    command = f"deepspeed {one_host} --launcher openmpi --launcher_args {to_mpirun} ring.py"
    # DeepSpeed runs `python -u`, which writes a line and its end separately, so lines of two ranks may meet.
    check_ring_output(of_command(command, tmp_path).replace("rank ", "\nrank "))


def last_line(output: str) -> str:
    """What a program says at its end. Ray puts the name of a worker before it."""
    return re.findall(r"loss \S+ in step \d+, on a ring of \d+", output)[-1]


def test_lightning(tmp_path):
    needs("lightning")
    (tmp_path / "lightning_ring.py").write_text(code("clusters.md", "lightning_ring.py"))
    alone, ring = (last_line(output_of(["lightning_ring.py", size], tmp_path)) for size in ("1", "2"))
    assert (alone.split()[-1], ring.split()[-1]) == ("1", "2")
    assert alone.rsplit(None, 1)[0] == ring.rsplit(None, 1)[0]
    assert " in step 6," in ring


DIES = """\
        state.save(path)
        if ring.rank == 1 and state.step_count == 3 and not os.path.exists(folder + "/died"):
            open(folder + "/died", "w").close()
            os._exit(1)
"""


@pytest.mark.timeout(900)  # Ray's processes start slowly on a busy machine
def test_ray(tmp_path, monkeypatch, capsys):
    """A worker dies in step 3. Ray restarts both, up to step 4. A ring of one continues up to step 6."""
    needs("ray")
    program = changed(code("clusters.md", "ray_train.py"), ("n, steps = 2048, 6", "n, steps = 2048, 4"))
    (tmp_path / "ray_train.py").write_text(changed(program, ("        state.save(path)\n", DIES)))
    # Ray writes a token into the home folder. On a busy machine, its daemons and workers start slowly.
    patience = {"RAY_raylet_start_wait_time_s": "200", "RAY_worker_register_timeout_seconds": "300"}
    variables = environment(HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0", **patience)
    output = output_of(["ray_train.py"], tmp_path, variables, timeout=420)
    assert last_line(output).endswith("in step 4, on a ring of 2")
    assert (tmp_path / "ray_results" / "died").exists()

    program = code("clusters.md", "ray_train.py")
    (tmp_path / "ray_train.py").write_text(changed(program, ("num_workers=2", "num_workers=1")))
    continued = last_line(output_of(["ray_train.py"], tmp_path, variables, timeout=420))

    # The reference is a run in this process, without Ray's workers and without interruption.
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    namespace = runpy.run_path(str(tmp_path / "ray_train.py"))
    (tmp_path / "alone" / "ray_results").mkdir()
    with mock.patch("ray.train.report"), mock.patch("torch.distributed.all_reduce"):
        namespace["train"]()
    assert last_line(capsys.readouterr().out) == continued
    assert continued.endswith("in step 6, on a ring of 1")


def test_the_page_names_the_installed_accelerate():
    """`accelerate launch --cpu --num_processes 2` starts one process. If this changes, the page has to change."""
    needs("accelerate")
    command = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    command += shlex.split("--mixed_precision no --dynamo_backend no")
    print_rank = ["--no_python", sys.executable, "-c", "import os; print('rank', os.environ.get('RANK'), flush=True)"]
    folder = Path(__file__).parent
    one = output_of([*command, "--cpu", *print_rank], folder)
    two = output_of([*command, "--multi_gpu", *print_rank], folder)
    assert re.findall(r"^rank .*", one, re.MULTILINE) == ["rank None"]
    assert sorted(re.findall(r"^rank .*", two, re.MULTILINE)) == ["rank 0", "rank 1"]
