"""Wrong uses of the commands: each ends with its exit code and one sentence, before anything of a
job has started."""

import shlex
import socket
from pathlib import Path

import pytest

from support.forked_commands import ends

pytestmark = pytest.mark.fault

TOKEN = "SCALAI_JOB_TOKEN=" + "x" * 32
FILES = {
    "ok.py": "",
    "folder/readme": "",
    "bad.toml": "[store\n",
    "key.toml": "[resiz]\nx = 1\n",
    "type.toml": '[resize]\nsettle_s = "soon"\n',
    "range.toml": "[resize]\nsettle_s = -1\n",
    "e.toml": "[model]\nnum_attention_heads = 8\n",
    "tp5.toml": '[model]\nnum_attention_heads = 8\n[degrees]\n1 = "tp5"\n',
    "bad.json": "{",
    "key.json": '{"train_batch_size": 4, "scalai": {"resizes": {}}}',
    "hosts": "elsewhere slots=2\n",
    "untried/megatron/core/package_info.py": "MAJOR = 9\nMINOR = 1\nPATCH = 0\n",
    "untried/pretrain_gpt.py": "",
}
RUN = "scalai-run --store-dir {0}/store"
JOB = f"{RUN} --elastic e.toml"
ALONE = f"{JOB} --standalone"
GPT = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --micro-batch-size 1 "
    "--global-batch-size 4"
)
FAULTS = "this job cannot be elastic:"
"""A line for each follows."""
UNTRIED = "megatron-core 9.1.0 was never tried"

USES = (
    # ---------------------------------------------------------------- a slip of the keyboard
    ("scalai-run", 2, "no training script is given"),
    ("scalai-run --nprocs-per-node 2 ok.py", 2, "Did you mean --nproc-per-node?"),
    ("scalai-run --nproc-per-node x ok.py", 2, "--nproc-per-node x: expected a number, auto"),
    ("scalai-run --nproc-per-node 0 ok.py", 2, "expected 1 or more"),
    ("scalai-run --nnodes 4:2 ok.py", 2, "expected 1 <= MIN <= MAX"),
    ("scalai-run --nnodes many ok.py", 2, "neither N nor MIN:MAX"),
    ("scalai-run --max-restarts x ok.py", 2, "--max-restarts: 'x' is not a whole number"),
    ("scalai-run --max-restarts -1 ok.py", 2, "negative"),
    ("scalai-run --store-budget-gb x ok.py", 2, "--store-budget-gb: 'x' is not a number"),
    ("scalai-run --allowed-sizes 2,x ok.py", 2, "--allowed-sizes: 'x' is neither a number nor"),
    ("scalai-run --allowed-sizes 0 ok.py", 2, "names no world size of 1 or more"),
    ("scalai-run --drained-exit-code 256 ok.py", 2, "no exit code (0 to 255)"),
    ("scalai-run --snapshot-every -3 ok.py", 2, "neither a number of steps nor auto"),
    ("scalai-run --snapshot-every 1.5 ok.py", 2, "neither a number of steps nor auto"),
    ("scalai-run --snapshot-every '' ok.py", 2, "neither a number of steps nor auto"),
    ("scalai-run --probe foo ok.py", 2, "--probe: 'foo' is none of nvidia-smi, command:CMD"),
    ("scalai-run --preemption foo ok.py", 2, "'foo' is none of signal, slurm, file:PATH, aws"),
    ("scalai-run --signals-to-handle SIGFOO ok.py", 2, "no signal that a process can handle"),
    ("scalai-run --signals-to-handle SIGTERM,SIGKILL ok.py", 2, "'SIGKILL' is no signal"),
    ("scalai-run --redirects 9 ok.py", 2, "--redirects 9 is neither 0, 1, 2 nor 3"),
    ("scalai-run --tee 0:x ok.py", 2, "--tee 0:x is neither 0, 1, 2 nor 3"),
    ("scalai-run --local-ranks-filter 0,x ok.py", 2, "0,x is no list of local ranks"),
    ("scalai-run --job ../x ok.py", 2, "job name '../x' cannot name a directory"),
    # ---------------------------------------------------------------- flags of torchrun
    ("scalai-run --rdzv-backend etcd ok.py", 2, "--coordinator HOST:PORT"),
    ("scalai-run --numa-binding node ok.py", 2, "--numa-binding is not supported"),
    ("scalai-run --virtual-local-rank ok.py", 2, "not supported"),
    ("scalai-run --no-python ok.sh", 2, "Python program"),
    ("scalai-run --tls a,b,c ok.py", 2, "--tls is not known any more"),
    # ---------------------------------------------------------------- files and folders
    (f"{RUN} nosuch.py", 2, "there is no script 'nosuch.py' (in {0})"),
    (f"{ALONE} nosuch.py", 2, "there is no script 'nosuch.py'"),
    (f"{RUN} folder", 2, "folder without a __main__.py"),
    (f"{RUN} -m nosuch.module", 2, "there is no module 'nosuch'"),
    ("scalai-run --elastic nosuch.toml ok.py", 2, "--elastic nosuch.toml: No such file"),
    ("scalai-run --elastic folder ok.py", 2, "--elastic folder: Is a directory"),
    ("scalai-run --elastic bad.toml ok.py", 2, "bad.toml is not TOML"),
    ("scalai-run --elastic key.toml ok.py", 2, "did you mean 'resize'?"),
    ("scalai-run --elastic type.toml ok.py", 2, "[resize] settle_s = 'soon' is not a number"),
    ("scalai-run --elastic range.toml ok.py", 2, "expected 0 or more seconds"),
    ("scalai-run --elastic a ok.py --elastic b", 2, "--elastic is given twice"),
    ("scalai-run ok.py --elastic", 2, "--elastic needs the path"),
    ("scalai-run ok.py --deepspeed_config nosuch.json", 2, "nosuch.json: there is no file"),
    ("scalai-run ok.py --deepspeed_config bad.json", 2, "is not a JSON object"),
    ("scalai-run ok.py --deepspeed_config key.json", 2, "did you mean 'resize'?"),
    ("scalai-run --hostfile nosuch ok.py", 2, "--hostfile nosuch: No such file"),
    ("scalai-run --hostfile hosts ok.py", 2, "Name it by --host-id"),
    ("scalai-run --store-dir /proc/nosuch ok.py", 3, "--store-dir /proc/nosuch cannot be used"),
    ("scalai-run --store-dir {0}/ok.py ok.py", 3, "Choose another --store-dir"),
    (f"{JOB} --durable-dir /proc/nosuch ok.py", 3, "--durable-dir /proc/nosuch cannot be"),
    (f"{JOB} --log-dir /proc/nosuch ok.py", 3, "--log-dir /proc/nosuch cannot be used"),
    (f"{ALONE} --report-dir /proc/nosuch ok.py", 3, "--report-dir /proc/nosuch cannot be used"),
    # ---------------------------------------------------------------- the job
    (f"{RUN} --elastic tp5.toml ok.py", 3, '[degrees] "1" cannot be used (TP5·PP1 does not fit'),
    (f"{JOB} --allowed-sizes 5,7 ok.py", 3, "1 hosts of 1 workers are 1 at most"),
    (f"{JOB} --nnodes 1:3 --replicas 5 ok.py", 3, "--nnodes has 3 at most. Use 2."),
    (f"{JOB} --replicas -1 ok.py", 2, "[store] replicas = -1; expected 0 or more"),
    (f"{JOB} --silent-s 1 ok.py", 2, "expected 3 or more seconds"),
    (f"{JOB} --health-check \"a 'b\" ok.py", 2, "expected a command, such as"),
    (f"{JOB} --health-check 'nosuch --quick' ok.py", 2, "there is no executable 'nosuch' (in"),
    (f"{JOB} --health-check {{0}}/ok.py ok.py", 2, "there is no executable '{0}/ok.py'"),
    (f"{JOB} {GPT} --use-megatron-fsdp", 3, "--use-megatron-fsdp"),
    (f"{JOB} untried/{GPT}", 3, UNTRIED),
    (f"{JOB} --check-elastic untried/{GPT}", 3, UNTRIED),
    (f"{RUN} --check-elastic untried/{GPT}", 3, UNTRIED),
    # ---------------------------------------------------------------- addresses
    (f"{RUN} --coordinator head ok.py", 2, "head is not HOST:PORT"),
    (f"{RUN} --coordinator fe80::1:1 ok.py", 2, "[ADDRESS]:PORT with an IPv6 address"),
    (f"{RUN} --coordinator head:99999 ok.py", 2, "a port is 65535 at most"),
    (f"{RUN} --coordinator 192.0.2.1:1 ok.py", 2, "is on another host; set SCALAI_JOB_TOKEN"),
    (f"SCALAI_JOB_TOKEN=abc {RUN} --coordinator 127.0.0.1:1 ok.py", 2, "has 3 characters"),
    ("SCALAI_JOB_TOKEN=abc scalai coordinator --listen 127.0.0.1:0 -- ok.py", 2, "at least 16 are"),
    (f"{RUN} --coordinator 127.0.0.1:{{1}} ok.py", 1, "Address already in use"),
    (f"{RUN} --coordinator-lease foo ok.py", 2, "--coordinator-lease 'foo' is neither file:"),
    (f"{RUN} --port-range 1-x ok.py", 2, "--port-range: '1-x' is not LOW-HIGH, 1 to 65535"),
    (f"{RUN} --port-range 30000-30003 ok.py", 2, "has fewer than 5 ports"),
    (f"{RUN} --local-addr 192.0.2.1 ok.py", 2, "--local-addr 192.0.2.1 is no address of this"),
    # ---------------------------------------------------------------- scalai
    ("scalai", 2, "the following arguments are required: COMMAND"),
    ("scalai statsu", 2, "Did you mean status?"),
    ("scalai status --nosuch", 2, "unrecognized arguments: --nosuch. All flags: scalai status"),
    ("scalai status --job nosuch --store-dir {0}/store", 1, "no job 'nosuch' runs here"),
    (f"{TOKEN} scalai status --coordinator 127.0.0.1:1", 1, "nobody answers there"),
    ("scalai status --coordinator 127.0.0.1:1", 2, "set SCALAI_JOB_TOKEN to the secret"),
    ("scalai scale", 2, "say what to change: --nproc N"),
    ("scalai scale --degrees 'fast please' --store-dir {0}/store", 2, "'fast' in 'fast please'"),
    ("scalai resume", 2, "required: --generation"),
    ("scalai coordinator", 2, "no training script is given"),
    ("scalai coordinator -- --nnodes a ok.py", 2, "--nnodes a is neither N nor MIN:MAX"),
    ("scalai reshard nosuch dst", 2, "nosuch does not exist"),
    ("scalai reshard folder dst", 3, "folder holds no checkpoint of a known layout"),
    ("scalai reshard folder dst --workers 0", 2, "--workers: '0' is no number of processes"),
    ("scalai verify folder --workers -1", 2, "--workers: '-1' is no number of processes"),
    ("scalai verify nosuch", 2, "nosuch does not exist"),
    ("scalai inspect nosuch", 2, "nosuch does not exist"),
    ("scalai inspect ok.py", 3, "ok.py holds no committed generation"),
    ("scalai ledger", 2, "required: ACTION"),
    ("scalai ledger verify nosuch --store-dir {0}/store", 2, "no job 'nosuch' has a store here"),
    ("scalai mount nosuch empty --store-dir {0}/store", 2, "no job 'nosuch' has a store here"),
    ("scalai mount nosuch nowhere", 2, "nowhere is no folder. Make it: mkdir -p"),
    ("scalai unmount folder", 2, "nothing is mounted at {0}/folder"),
    ("scalai chaos nosuch --store-dir {0}/store", 2, "no job 'nosuch' runs here"),
    ("scalai chaos nosuch --faults kill-everything", 2, "there is no fault 'kill-everything'"),
    ("scalai plan --gpus 8", 3, "give either --model PATH, or"),
    ("scalai plan --gpus x", 2, "--gpus: 'x' is no whole number of 1 or more"),
    ("scalai plan --gpus 8 --gpu rtx9999 --model e.toml", 3, "not in the table of devices"),
    ("scalai plan --gpus 8 -- nosuch.py --num-layers 2", 3, "state the model by --model"),
    ("scalai clean --job nosuch --store-dir {0}/empty", 2, "no job 'nosuch', nor another one."),
)  # fmt: skip
"""A command line ({0}: its folder, {1}: a port in use), its exit code, a part of its sentence."""

ALSO = "event=device"
"""A line before the sentence: degrees may depend on the device."""


@pytest.mark.timeout(600)
def test_a_wrong_use_is_one_sentence_with_its_exit_code(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        lines = [shlex.split(line.format(tmp_path, port)) for line, _, _ in USES]
        found = ends(lines, tmp_path)
    wrong = []
    for (line, code, says), ended in zip(USES, found, strict=True):
        said = [each for each in ended.said.splitlines() if ALSO not in each]
        is_one = len(said) == 1 or said[:1] == [f"scalai-run: {FAULTS}"]
        is_one &= bool(said) and said[0].startswith("scalai") and "Traceback" not in ended.said
        if not (is_one and ended.code == code and says.format(tmp_path) in "\n".join(said)):
            wrong.append(f"{line}\n  expected {code}: {says}\n  found {ended.code}: {ended.said}")
    assert not wrong, "\n".join(wrong)
    assert not list((tmp_path / "store").glob("*/*/workers.sock")), "nothing is left"
