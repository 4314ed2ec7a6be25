import gzip
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data import text
from hotrec.data.text import NUMBER, TEXT, Layout, Lines

LAYOUT = Layout(("a", "b"), ",", True, ("",), {"a": NUMBER, "b": TEXT})


def lines(data: bytes, first_line: int = 1) -> Lines:
    return Lines(data, first_line, data.count(b"\n"))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab,\t", max_size=12), min_size=1, max_size=30),
    st.integers(13, 60),
    st.booleans(),
    st.booleans(),
)
def test_blocks_hold_every_line_once(tmp_path_factory, rows, block_bytes, has_header, is_ended):
    path = tmp_path_factory.mktemp("lines") / "log"
    body = "\n".join([*rows, ""] if is_ended or not rows[-1] else rows)
    path.write_text(("header\n" if has_header else "") + body)
    blocks = list(text.read_lines(path, block_bytes, has_header=has_header))
    assert b"".join(block.data for block in blocks) == ("\n".join(rows) + "\n").encode()
    number = 2 if has_header else 1
    for block in blocks:
        assert block.first_line == number
        assert block.num_lines == block.data.count(b"\n")
        number += block.num_lines


@pytest.mark.parametrize(("content", "number"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2)])
def test_a_last_line_needs_no_end(content, number, tmp_path):
    (tmp_path / "log").write_text(content)
    assert text.count_lines(tmp_path / "log") == number


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2"])
def test_compressed_files_read_the_same_or_are_cut_short(tmp_path, suffix):
    data = b"".join(b"%d,x\n" % number for number in range(5000))
    path = tmp_path / f"log.csv{suffix}"
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write(data)
    blocks = list(text.read_lines(path, 1000, has_header=False))
    assert b"".join(block.data for block in blocks) == data
    assert text.count_lines(path) == 5000

    if suffix:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match=rf"log\.csv\{suffix}: expected a readable file"):
            list(text.read_lines(path, 1000, has_header=False))


def test_several_gzip_members_in_one_file(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"1,x\n") + gzip.compress(b"2,y\n"))
    [block] = text.read_lines(path, 1000, has_header=False)
    assert block.data == b"1,x\n2,y\n"


@pytest.mark.parametrize(
    ("data", "has_header", "message"),
    [
        (b"", False, "log: expected lines, got none"),
        (b"", True, "log: expected lines after the header, got none"),
        (b"a,b\n", True, "log: expected lines after the header, got none"),
        (b"a,b", True, "log: expected lines after the header, got none"),
        (b"x" * 5000, False, "log line 1: expected a line of at most 1000 bytes"),
        (b"a\n" + b"x" * 5000, True, "log line 2: expected a line of at most 1000 bytes"),
    ],
)
def test_files_without_lines_are_refused(tmp_path, monkeypatch, data, has_header, message):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(text.read_lines(path, 1000, has_header=has_header))


@pytest.mark.parametrize(("data", "number"), [(b"x" * 2000, 1), (b"1,a\n" * 3 + b"x" * 2000, 4)])
def test_lines_without_end_are_not_counted(tmp_path, monkeypatch, data, number):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(data))
    expected = rf"log\.gz line {number}: expected a line of at most 1000 bytes"
    with pytest.raises(ValueError, match=expected):
        text.count_lines(path)


def test_long_lines_are_read_in_linear_time(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a\n" + b"x" * (32 << 20) + b"\nb")
    start_s = time.process_time()
    blocks = list(text.read_lines(path, 1 << 14, has_header=False))
    assert time.process_time() - start_s < 5
    assert [block.num_lines for block in blocks] == [1, 1, 1]
    assert len(blocks[1].data) == (32 << 20) + 1


def test_a_long_value_beside_a_bad_line_is_read():
    block = lines(b"1," + b"x" * 200_000 + b"\nbad\n")
    bad, kept, _ = text.find_bad_lines(block, LAYOUT)
    assert bad == [(2, "2 columns", "1")]
    assert kept.num_lines == 1


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.tsv: expected a readable file.*No such"):
        list(text.read_lines(tmp_path / "absent.tsv", 1000, has_header=False))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a header line"),
        (b"a,b,a\n1,2,3\n", r"expected unique column names, got \['a'\]"),
        (b"\xff\xfe\n", "line 1: expected UTF-8"),
        (b"x" * (2 << 20), "line 1: expected a header line of at most 1048576 bytes, got a lo"),
        (b"a,b\r1,2\r3,4", "line 1: expected a newline at the end of the line, got a carriage"),
    ],
)
def test_bad_headers_are_refused(tmp_path, data, message):
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        text.read_header(path, ",")


def test_headers_may_be_quoted_and_marked(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'\xef\xbb\xbf"a","b c"\r\n1,2\r\n')
    assert text.read_header(path, ",") == ("a", "b c")


def test_good_lines_are_parsed():
    table = text.parse(lines(b'1,x\n,"a,b"\n-2.5e3,\n'), LAYOUT)
    assert table is not None
    assert table["a"].to_pylist() == [1.0, None, -2500.0]
    assert table["b"].to_pylist() == ["x", "a,b", None]


@pytest.mark.parametrize(
    ("line", "expected", "got"),
    [
        (b"1", "2 columns", "1"),
        (b"1,x,y", "2 columns", "3"),
        (b"", "2 columns", "an empty line"),
        (b"1,\xff", "UTF-8 text", "byte 0xff at position 2"),
        (b"1,x\r2", "no carriage return inside a line", "one at position 3"),
        (b'1,"x', "a closing quote in the line", "none"),
    ],
)
def test_a_bad_line_is_found_among_good_ones(line, expected, got):
    block = lines(b"1,x\n" * 3 + line + b"\n" + b"2,y\n" * 3, first_line=100)
    assert text.parse(block, LAYOUT) is None
    bad, kept, numbers = text.find_bad_lines(block, LAYOUT)
    assert bad == [(103, expected, got)]
    assert kept.data == b"1,x\n" * 3 + b"2,y\n" * 3
    assert numbers == [100, 101, 102, 104, 105, 106]


def test_nan_may_be_named_as_missing():
    layout = Layout(("a", "b"), ",", True, ("", "nan"), {"a": NUMBER, "b": TEXT})
    table = text.parse(lines(b"1,x\nnan,y\n"), layout)
    assert table is not None
    assert table["a"].to_pylist() == [1.0, None]


@pytest.mark.parametrize("line", [b" 1 ,x", b"+1,x", b".5,x", b"5.,x", b'"1","x"', b",x", b"1e5,"])
def test_what_the_fast_parser_takes_the_slow_check_takes(line):
    block = lines(line + b"\r\n")
    assert text.parse(block, LAYOUT) is not None
    assert text.find_bad_lines(block, LAYOUT)[0] == []


def test_without_quoting_quotes_are_text():
    layout = Layout(("a", "b"), "\t", False, ("",), {"a": NUMBER, "b": TEXT})
    table = text.parse(lines(b'1\t"x\n2\ty"\n'), layout)
    assert table is not None
    assert table["b"].to_pylist() == ['"x', 'y"']
