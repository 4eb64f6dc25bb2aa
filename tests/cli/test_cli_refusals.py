"""Whatever a user gets wrong: one line that says what and where, exit code 2, and
nothing left behind.
"""

import shlex
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command_line import refused
from support.processes import PATIENCE_S, start
from support.small_trace import write_small_trace


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A trace ``t.parquet`` and things that are none."""
    folder = tmp_path_factory.mktemp("material")
    whole = write_small_trace(folder / "t.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "text.parquet").write_text("not a trace\n")
    pq.write_table(pa.table({"a": [1, 2]}), folder / "foreign.parquet")
    (folder / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    (folder / "p.txt").write_text("a prompt\n")
    (folder / "empty").write_bytes(b"")
    (folder / "half.toml").write_text("x = [")
    (folder / "other.toml").write_text("name = 'a'\n")
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "folder").mkdir()
    return folder


# Each line: a command line, in which @ stands for the folder of `material`, then words
# that its error must have.
WRONG = """
replay                                                    | TRACE; moesim replay --help
replay @none.parquet                                      | none.parquet; No such file
replay @cut.parquet                                       | cut.parquet
replay @foreign.parquet --out run                         | foreign.parquet
replay ""                                                 | argument; empty
replay qwen3-30b-a3b                                      | moesim trace synth qwen3-30b-a3b.parquet
replay gpt-oss-20b-lik                                    | did you mean 'gpt-oss-20b-like'
replay @m.gguf                                            | `moesim advise` and `moesim model` read it
replay @t.parquet --policy greedy ""                      | argument; empty
replay @t.parquet --policy greedy --policy on-demand      | --policy: expected it once
replay @t.parquet --policy greedy,on-demand               | one policy is expected here
replay @t.parquet --policy greedi                         | did you mean 'greedy'
replay @t.parquet --cache lruu                            | unknown cache policy 'lruu'; did you mean 'lru'
replay @t.parquet --prefetch next-gate                    | next-gate; pred1_raw
replay @t.parquet --hw rtx4060ti,rtx3080ti                | one machine is expected here
replay @t.parquet --hw "RTX 4060 Ti"                      | did you mean 'rtx4060ti'
replay @t.parquet --hw @none.toml                         | none.toml
replay @t.parquet --cache-ratio 50%                       | expected a number between 0 and 1, got '50%'
replay @t.parquet --steps 0                               | expected a whole number >= 1, got 0
replay @t.parquet --gpu-memory 4GiB,8GiB                  | one size is expected here
replay @t.parquet --gpu-memory 1KiB                       | no room to stage; 1.0 KiB do not hold
replay @t.parquet --cache-ratio 0.5 --slots-per-layer 2   | at most one
replay @t.parquet --perfetto @binary/p.json               | binary; expected a folder
replay @t.parquet --out ""                                | --out; empty
run @t.parquet --gpu-split experts                        | No such option: --gpu-split (see: moesim run --help)
replay @t.parquet more                                    | more
replay @t.parquet --hw                                    | --hw
replay @t.parquet --policy greedy:foo=1                   | foo
replay @t.parquet --policy greedy+lru+none+x              | at most assignment+cache+prefetch
replay @t.parquet --policy greedy+lru --cache lfu         | said once
replay @t.parquet --cache lfu:decay=nan                   | decay
replay @t.parquet --routing lru                           | unknown routing policy
replay @t.parquet --host-cache nope                       | unknown cache policy 'nope'
replay @t.parquet --hw @half.toml                         | half.toml
replay @t.parquet --hw @other.toml                        | other.toml
run @t.parquet --temperature 1                            | --temperature; expected --model
run --model tiny --prompts @p.txt --steps 4         | --steps; expected none beside --model
run --model tiny --prompts @none                           | none: ; found: No such file
run --model tiny --prompts @p.txt --residual @none  | --residual; no such file
replay @t.parquet --cache-ratio nan                       | --cache-ratio
replay @t.parquet --slots-per-layer -1                    | --slots-per-layer
replay @t.parquet --slots-per-layer 9999999999            | 0 <= slots <= 8
replay @t.parquet --gpu-memory -5GiB                      | --gpu-memory; such as 8GiB
replay @t.parquet --host-memory 1KiB                      | --host-memory
replay @t.parquet --cache-scope both                      | layer or global
replay @t.parquet --staging 0                             | --staging
replay @t.parquet --prefetch-budget -1                    | --prefetch-budget
replay @t.parquet --gpu-split rows                        | layers or experts
replay @t.parquet --batch 0                               | --batch
replay @t.parquet --batch 99999999999999999999999         | batch
replay @t.parquet --staging 9223372036854775808           | --staging
replay @t.parquet --prefetch-budget 9223372036854775808   | --prefetch-budget
replay @t.parquet --draft-tokens 9223372036854775808      | --draft-tokens
replay @t.parquet --seed -1                               | --seed
replay @t.parquet --warm @text.parquet                    | text.parquet
replay @t.parquet --warm tiny                             | --warm; expected 3 layers x 8 experts; record it from that model
train-cache @t.parquet --held-out tiny --out o            | --held-out; record it from that model
replay @t.parquet --artefacts @folder                     | --artefacts
replay @t.parquet --out @t.parquet                        | t.parquet; expected a folder
replay @t.parquet --out /proc/run                         | /proc
replay @t.parquet --slo ttft=1                            | --slo; expected --arrivals
replai                                                    | did you mean 'replay'
compare @t.parquet --png=                                 | --png; empty
compare @t.parquet --policy ,                           | --policy
compare @t.parquet --policy all-cpu,greedy+lruu --out o | lruu
compare @t.parquet --policy all-cpu --html @t.parquet/x | t.parquet
compare @t.parquet --gpu-memory 1KiB                      | cannot run; --gpu-memory: no room
compare @t.parquet --table @t.parquet                     | t.parquet; would replace what is read
compare @t.parquet --png a.png --html a.png               | --html: expected a name that ends in .html
replay @t.parquet --perfetto @folder/../t.parquet         | --perfetto; .json
replay @t.parquet --out r --perfetto r/run.json           | r/run.json; would replace another result
trace import @t.parquet @t.parquet                        | t.parquet; would replace what is read
results @ --table @t.parquet                              | t.parquet; would replace what is read
record x.parquet --prompts @absent.txt                     | absent.txt
record x.parquet --prompts @p.txt --model @folder   | config.json
record @binary --prompts @binary                    | binary; would replace what is read
record --prompts @empty --model @ --calibration @binary | binary; would replace what is read
hits @t.parquet --cache lru,nope --png x.png             | nope
hits @t.parquet --cache-ratio 0.1,2                      | --cache-ratio: expected a number between 0 and 1, got 2.0
list nope                                                 | nope; cache
gap @t.parquet --routing expert-cache-router              | routing
reproduce --all                                           | --out
reproduce --all --out x --paper DALLI                     | expected one of DALI
trace infoo                                               | did you mean 'info'
trace export @t.parquet x.csv                             | --to
trace export @t.parquet x.csv --to nope                   | nope
trace synth x.parquet                                     | --tokens
trace synth x.parquet --tokens inf --shape olmoe-1b-7b    | --tokens
trace synth x.parquet --tokens 9                          | --like; --shape
trace synth x.parquet --tokens 9 --shape nope             | nope
trace synth x.parquet --tokens 9 --shape layers=99999999999,experts=6,top_k=1,expert_bytes=1 | memory
trace synth x.parquet --tokens 9 --like @t.parquet --skew 1          | --skew
trace synth x.parquet --tokens 9 --like @t.parquet --quant q4_k_m  | --quant
trace import @t.parquet                                   | SRC…
trace import @binary x.parquet --shape olmoe-1b-7b        | binary
trace import @binary x.parquet --shape layers=1,experts=2,top_k=1,expert_bytes=1KiB --quant q4_k_m | --quant; which says the bytes already
trace import @binary x.parquet --shape olmoe-1b-7b --option batch | --option; NAME=VALUE
record                                                    | --prompts; expected a file
record --prompts @none.txt --host-memory 1GiB             | --host-memory; --store
record --prompts @p.txt --split both                  | calibration or evaluation
record --prompts @p.txt --column x                    | a text; x
record --prompts @p.txt --device nope                 | --device; nope
quality --dtype nope                                      | --dtype; nope
quality --residual @none                                  | none
calibrate --shape olmoe-1b-7b/4                          | two sizes
profile hw.txt                                      | .toml
profile @folder                                     | folder
run                                                       | TRACE; --model
run --model tiny                                          | --prompt
replay @t.parquet --micro-batch 0                         | --micro-batch; >= 1
replay @t.parquet --draft-tokens -1                       | --draft-tokens; between 0 and 1024
replay @t.parquet --draft-tokens 1025                     | --draft-tokens; between 0 and 1024
replay @t.parquet --acceptance -0.1                       | --acceptance; between 0 and 1
replay @t.parquet --acceptance 1.1                        | --acceptance; between 0 and 1
replay @t.parquet --context-tokens 16777217               | --context-tokens; between 0 and 16777216
replay @t.parquet --staging 1048577                       | --staging; between 1 and 1048576
run --model tiny --prompts @p.txt --temperature -1        | --temperature; >= 0
run --model tiny --prompts @p.txt --new-tokens -1         | --new-tokens; >= 0
run @t.parquet --distinct 0                               | --distinct; >= 1
record x.parquet --prompts @p.txt --limit 0               | --limit; >= 1
search @t.parquet --over cache_ratio=0.1:0.5 --trials 0   | --trials; >= 1
search @t.parquet --over cache_ratio=0.1:0.5 --minutes -1 | --minutes; >= 0
sweep @t.parquet --jobs 0                                 | --jobs; >= 1
reproduce --all --out x --jobs 0                          | --jobs; >= 1
validate @t.parquet --steps 1                             | --steps; >= 2
validate @t.parquet --repetitions 0                       | --repetitions; >= 1
quality --tokens 0                                        | --tokens; >= 1
quality --prompt-tokens 0                                 | --prompt-tokens; >= 1
quality --scored-tokens 0                                 | --scored-tokens; >= 1
train-cache @t.parquet --out o --epochs 0                 | --epochs; >= 1
train-cache @t.parquet --out o --hidden 0                 | --hidden; >= 1
trace synth x.parquet --tokens 0 --shape olmoe-1b-7b      | --tokens; between 1 and
trace synth x.parquet --tokens 9 --shape olmoe-1b-7b --skew 5.1   | --skew; between 0 and 5
trace synth x.parquet --tokens 9 --shape olmoe-1b-7b --reuse 1    | --reuse; between 0 and 0.99
trace synth x.parquet --tokens 9 --shape olmoe-1b-7b --memory 11  | --memory; between 0 and 10
trace synth x.parquet --tokens 9 --shape olmoe-1b-7b --topic -0.1 | --topic; between 0 and 1
trace predict @t.parquet x.parquet --at 0                 | --at; >= 1
"""
ROWS = [
    tuple(part.strip() for part in line.split("|"))
    for line in WRONG.strip().splitlines()
]


@pytest.mark.parametrize(("line", "words"), ROWS, ids=[line for line, _ in ROWS])
def test_what_is_wrong_is_one_line_and_leaves_nothing(command, material, line, words):
    before = {path: path.stat().st_mtime_ns for path in material.rglob("*")}
    result = command(*shlex.split(line.replace("@", f"{material}/")))
    for word in words.split(";"):
        assert word.strip().lower() in result[2].lower()
    assert refused(result)
    assert list(Path().rglob("*")) == []
    assert {path: path.stat().st_mtime_ns for path in material.rglob("*")} == before


@pytest.mark.parametrize("group", [(), ("trace",)])
def test_a_group_without_a_command_answers_with_its_help(command, group):
    code, out, err = command(*group)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: moesim")
    assert ("Commands:" if group else "Begin here:") in err


# The process and what surrounds it.


def started(words, folder, **surroundings):
    """A command whose output is bytes."""
    return start(
        *("-m", "moesim", *words),
        cwd=folder,
        environment={"XDG_CONFIG_HOME": str(folder), **surroundings},
        stdin=subprocess.DEVNULL,
        text=False,
    )


@pytest.mark.parametrize(
    "words", [("list", "--json"), ("list", "machines")], ids=" ".join
)
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, words):
    """``moesim list | head``, whether the output fills the pipe or still waits to be
    flushed.
    """
    process = started(words, tmp_path)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=PATIENCE_S) == 1


@pytest.mark.parametrize(
    "surroundings",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20"},
    ],
    ids=["ascii", "dumb"],
)
def test_a_poor_terminal_gets_everything(tmp_path, surroundings):
    """No character is lost to a traceback where the terminal knows ASCII only, or is
    narrow and without colour.
    """
    write_small_trace(tmp_path / "t.parquet")
    for words in (
        ("compare", "t.parquet", "--policy", "all-cpu,greedy"),
        ("validate", "--help"),
        ("list",),
    ):
        out, err = started(words, tmp_path, **surroundings).communicate(
            timeout=PATIENCE_S
        )
        assert out
        assert b"Traceback" not in err
        assert b"\x1b" not in out
