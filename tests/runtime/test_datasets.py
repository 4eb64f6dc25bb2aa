"""Prompts are found where people keep them, and a file without prompts is named in one
line.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.base.errors import TraceError
from moesim.runtime.text import read_prompts

CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "3"},
]


def test_lines_of_json_have_prompts_texts_or_messages(tmp_path):
    """The prompt of a conversation is what stands before its last answer; an answer in
    the middle belongs to it.
    """
    file = tmp_path / "set.jsonl"
    answered = {
        "conversations": [
            {"from": "human", "value": "what?"},
            {"from": "gpt", "value": "that"},
        ]
    }
    rows = [
        "plain",
        {"prompt": "p", "answer": "no"},
        {"text": "t"},
        {"question": "q"},
        {"messages": CHAT},
        answered,
    ]
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert read_prompts(file) == ["plain", "p", "t", "q", "one\n\ntwo\n\n3", "what?"]


@pytest.mark.parametrize(("name", "mark"), [("set.csv", ","), ("set.tsv", "\t")])
def test_tables_keep_line_breaks_inside_cells(tmp_path, name, mark):
    file = tmp_path / name
    file.write_text(
        f'\ufeffid{mark}prompt\n1{mark}"a{mark}\n\nb"\n2{mark}c\n', encoding="utf-8"
    )
    assert read_prompts(file) == [f"a{mark}\n\nb", "c"]
    assert read_prompts(file, column="id", limit=1) == ["1"]


def test_parquet_is_read_by_column_and_no_further_than_needed(tmp_path):
    """Texts and conversations; a column of another name is named by the user."""
    file = tmp_path / "set.parquet"
    pq.write_table(
        pa.table(
            {"code": [f"line {at}" for at in range(200)], "messages": [CHAT] * 200}
        ),
        file,
    )
    assert read_prompts(file, column="code", limit=130) == [
        f"line {at}" for at in range(130)
    ]
    assert read_prompts(file, limit=1) == ["one\n\ntwo\n\n3"]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        TraceError, match=r"set\.parquet: expected a readable data set, found"
    ):
        read_prompts(file)


def test_rows_past_the_limit_are_not_looked_at(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_text('"a"\n"b"\nnot json\n')
    assert read_prompts(file, limit=2) == ["a", "b"]
    with pytest.raises(
        TraceError, match=r"set\.jsonl: line 3: expected a JSON string or object"
    ):
        read_prompts(file)


@pytest.mark.parametrize(("name", "content", "column", "message"), [
    ("a.csv", "x,y\n1,2\n", None,
     (r"a\.csv: line 2: expected one of the columns prompt, .*found x, y;" r" name it")),
    ("a.csv", "x,y\n1,2\n", "z", r"a\.csv: line 2: expected column 'z', found x, y"),
    ("a.csv", "prompt\n", None, r"a\.csv: expected prompts, found no rows"),
    ("a.csv", "prompt,x\n,1\n", "prompt",
     r"a\.csv: line 2: prompt: expected text or a list of messages, found ''"),
    ("a.jsonl", "5\n", None, r"a\.jsonl: line 1: expected a JSON string, or an object"),
    ("a.jsonl", '{"messages": [1]}\n', None,
     r"a\.jsonl: line 1: messages: expected text or a list of messages"),
    ("a.jsonl", '{"prompt": {"a": 1}}\n', None,
     r"a\.jsonl: line 1: prompt: expected text or a list"),
    ("a.csv", b"prompt\n\xff\xfe\n", None, r"a\.csv: expected a readable data set"),
    ("a.parquet", "PAR1", None, r"a\.parquet: expected a readable data set"),
])  # fmt: skip
def test_what_is_no_data_set_is_said_in_one_line(
    tmp_path, name, content, column, message
):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError, match=message) as error:
        read_prompts(file, column)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.csv"):
        read_prompts(tmp_path / "none.csv")
