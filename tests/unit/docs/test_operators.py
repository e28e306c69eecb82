"""What the page for operators gives to copy is well-formed: the script for Slurm, the manifest, the container file, the
commands. Nothing here runs Slurm, Kubernetes or a container."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.checks import check_options
from buffer_rl.options.help import FlagParser, given_flags, normalise_flags, take_items
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.plan.counts import with_counts
from buffer_rl.verbs.table import VERBS, parser_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
PAGE = PAGE[PAGE.index("## Stop and resume\n") : PAGE.index("## Security\n")]
SCRIPT = ROOT / "examples" / "cluster" / "train.sbatch"
MANIFEST = ROOT / "examples" / "cluster" / "rayjob.yaml"
CONTAINERFILE = ROOT / "containers" / "Containerfile"
WORDS = 1_000


def fields(required: str, optional: str) -> tuple[set[str], set[str]]:
    """Those that must be there, and all that may be there."""
    return set(required.split()), {*required.split(), *optional.split()}


# From man sbatch: options that every site has, as far as a script like this needs them.
_, SBATCH = fields(
    "", "job-name nodes ntasks-per-node exclusive mem gpus-per-node time requeue open-mode output signal"
)
# From KubeRay, ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go (json tags; authOptions since 1.5.1), and the page
# "KubeRay CRD API reference" of Ray's documentation.
JOB = fields(
    "",
    "activeDeadlineSeconds backoffLimit rayClusterSpec submitterPodTemplate metadata clusterSelector submitterConfig "
    "managedBy entrypoint runtimeEnvYAML jobId submissionMode entrypointResources entrypointNumCpus entrypointNumGpus "
    "ttlSecondsAfterFinished shutdownAfterJobFinishes suspend",
)
CLUSTER = fields(
    "headGroupSpec",
    "suspend managedBy autoscalerOptions headServiceAnnotations enableInTreeAutoscaling gcsFaultToleranceOptions "
    "rayVersion workerGroupSpecs authOptions",
)
HEAD = fields("rayStartParams template", "headService enableIngress serviceType")
WORKERS = fields(
    "groupName minReplicas maxReplicas rayStartParams template",
    "suspend replicas idleTimeoutSeconds scaleStrategy numOfHosts",
)
# From Kubernetes' core/v1: PodSpec and Container, as far as the manifest uses them.
POD = fields("containers", "volumes securityContext terminationGracePeriodSeconds")
CONTAINER = fields("name image", "resources ports volumeMounts env")
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
SECRET = (
    r"(?i)(api[_-]?key|password|secret|token)\s*[=:]\s*[\"']?[^\s\"'$]|://[^/\s]*:[^/\s]*@|BEGIN [A-Z ]*PRIVATE KEY"
)


def lines(text: str) -> list[str]:
    """Commands of a shell, one a line, without comments."""
    joined = text.replace("\\\n", " ").splitlines()
    return [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined]


def commands() -> list[str]:
    """All command lines of ``buffer-rl`` that the page, the script and the manifest have."""
    code = re.findall(r"```\n(.*?)```", PAGE, flags=re.DOTALL) + re.findall(r"`([^`\n]+)`", PAGE)
    found = [line for text in code for line in lines(text) if re.match(r"buffer-rl [a-z]+ ", line)]
    found += [
        line.removesuffix("&") for line in lines(SCRIPT.read_text(encoding="utf-8")) if line.startswith("buffer-rl")
    ]
    return [*found, manifest()["spec"]["entrypoint"].removeprefix("exec ").strip()]


def manifest() -> dict[str, Any]:
    (document,) = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def check_fields(found: dict[str, Any], expected: tuple[set[str], set[str]]) -> None:
    required, known = expected
    assert required <= found.keys() <= known


def instructions() -> list[tuple[str, str]]:
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in lines(CONTAINERFILE.read_text()))
        if word
    ]


def test_the_page_is_short_and_other_pages_lead_to_it() -> None:
    assert len(PAGE.split()) <= WORDS
    assert "(docs/cluster.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(cluster.md" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_the_commands_are_found() -> None:
    verbs = [command.split()[1] for command in commands()]
    assert sorted(verbs) == ["checkpoint", "ledger", "train", "train", "train"]


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command.split()[1:4]))
def test_a_command_can_be_typed(command: str, tmp_path: Path) -> None:
    arguments = normalise_flags(shlex.split(command)[1:])
    assert arguments[0] in VERBS
    parser = FlagParser(prog="buffer-rl")
    parser_of(arguments[0])(parser.add_subparsers(), arguments)
    namespace, extra = parser.parse_known_args(arguments)
    assert extra == []
    if arguments[0] == "train":
        assert take_items(namespace, extra) == []
        config = tmp_path / "run.yaml"
        config.write_text("hf_checkpoint: /models/m\nprompt_data: d.jsonl\nnum_rollout: 3\nrm_type: exact_match\n")
        options = compose(CORE_SECTIONS)
        flags = given_flags(namespace)
        args: Any = with_counts(resolve(options, flags=flags, environ={}, config_paths=[str(config)]).args)
        check_options(args)


def test_both_files_resume_save_now_and_then_and_have_the_ledger_on_another_disk() -> None:
    for command in (command for command in commands() if "--ray-address" in command):
        flags = dict(re.findall(r"--([a-z-]+) (\S+)", command))
        assert flags["load"] == "auto"
        assert int(flags["save-interval"]) > 0
        disk = {name: re.search(r"\w+", flags[name])[0] for name in ("run-dir", "save", "ledger-dir")}
        assert disk["run-dir"] == disk["save"] != disk["ledger-dir"]


def test_the_script_for_slurm_is_valid_bash_and_every_directive_is_an_option_of_sbatch() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    text = SCRIPT.read_text(encoding="utf-8")
    directives = re.findall(r"^#SBATCH --([a-z-]+)", text, flags=re.MULTILINE)
    assert set(directives) <= SBATCH
    assert len(set(directives)) == len(directives) == text.count("\n#SBATCH")
    # sbatch reads directives before the first command only.
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")
    assert {"signal", "requeue"} <= set(directives)


def test_sigterm_to_the_script_reaches_the_run_and_puts_the_job_back_into_the_queue(tmp_path: Path) -> None:
    """The end of the script, from the start of the run on, with a run that ends 143 after SIGTERM."""
    tail = SCRIPT.read_text(encoding="utf-8").partition("run=$!\n")[2]
    stubs = """
        set -euo pipefail
        SLURM_JOB_ID=7
        scontrol() { echo "scontrol $*"; }
        bash -c 'trap "echo saved; exit 143" TERM; touch ready; while true; do sleep 0.02; done' &
        run=$!
        (while [[ ! -e ready ]]; do sleep 0.02; done; sleep 0.1; kill -s SIGNAL $$) &
    """
    for signal, output in (("TERM", "saved\nscontrol requeue 7\n"), ("USR1", "saved\n")):
        (tmp_path / "ready").unlink(missing_ok=True)
        script = stubs.replace("SIGNAL", signal) + tail
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (143, output), done.stderr


def test_a_run_that_ends_by_itself_is_not_put_back_into_the_queue() -> None:
    tail = SCRIPT.read_text(encoding="utf-8").partition("run=$!\n")[2]
    stubs = "set -euo pipefail; SLURM_JOB_ID=7; scontrol() { echo called; }; bash -c 'exit 2' & run=$!\n"
    done = subprocess.run(["bash", "-c", stubs + tail], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")


def test_the_manifest_has_the_fields_of_a_ray_job() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    check_fields(job["spec"], JOB)
    assert job["spec"]["submissionMode"] in {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"}
    assert job["spec"]["submitterConfig"].keys() == {"backoffLimit"}
    cluster = job["spec"]["rayClusterSpec"]
    check_fields(cluster, CLUSTER)
    assert cluster["authOptions"] == {"mode": "token"}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    check_fields(cluster["headGroupSpec"], HEAD)
    for workers in cluster["workerGroupSpecs"]:
        check_fields(workers, WORKERS)
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert group["template"].keys() == {"spec"}
        pod = group["template"]["spec"]
        check_fields(pod, POD)
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            check_fields(container, CONTAINER)
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"].keys() == {"requests", "limits"}


def test_every_instruction_of_the_container_file_is_known_and_what_it_copies_exists() -> None:
    found = instructions()
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert next(word for word, _ in found if word != "ARG") == "FROM"
    copied = [source for word, rest in found if word == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    # Everything that the wheel is built from, and both files of constraints.
    assert {"pyproject.toml", "README.md", "LICENSE", "buffer_rl", "rm_hub", "filter_hub", "plugins"} <= set(copied)
    assert {"constraints.txt", "constraints-cuda.txt"} <= set(copied)


def test_the_build_reads_no_weights_no_history_and_no_file_of_secrets() -> None:
    ignored = CONTAINERFILE.with_name("Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", "**/*.safetensors", "**/*.bin", "**/.env"} <= set(ignored)


def test_the_container_is_not_run_as_root_and_signals_reach_the_command() -> None:
    found = instructions()
    assert [rest for word, rest in found if word == "USER"] == ["1000"]
    assert [word for word, _ in found][-2:] == ["ENTRYPOINT", "CMD"]
    assert json.loads(found[-2][1]) == ["tini", "--", "buffer-rl"]
    assert isinstance(json.loads(found[-1][1]), list)


@pytest.mark.parametrize("path", [SCRIPT, MANIFEST, CONTAINERFILE], ids=lambda path: path.name)
def test_no_file_has_a_secret(path: Path) -> None:
    assert re.findall(SECRET, path.read_text(encoding="utf-8")) == []
    assert re.search(SECRET, "ENV WANDB_API_KEY=abc")
    assert re.search(SECRET, "--extra-index-url https://user:pass@host/simple")


def test_the_constraints_for_cuda_have_the_same_pins_and_none_that_excludes_a_build_of_torch() -> None:
    def meaningful(name: str) -> list[str]:
        text = (ROOT / name).read_text(encoding="utf-8")
        return [line for line in text.splitlines() if line and not line.startswith("#")]

    assert meaningful("constraints-cuda.txt") == ["-c constraints.txt"]
    pins = meaningful("constraints.txt")
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    assert "+" not in torch  # any local version fits
    assert [pin for pin in pins if re.match(r"(nvidia-|cuda-|triton)", pin)] == []
    assert len(pins) == len(set(pins))
