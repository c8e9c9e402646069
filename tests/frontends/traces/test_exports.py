"""Exports of Nsight Systems and plain tables, made here as the tools write them."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stablecast.frontends.traces import detect, read_trace
from stablecast.ir.errors import InputError
from stablecast.ir.trace_events import Category

_TABLES = """
create table StringIds (id integer primary key, value text);
create table TARGET_INFO_GPU (id integer, name text);
create table CUPTI_ACTIVITY_KIND_KERNEL (start integer, end integer, deviceId integer, streamId integer,
    correlationId integer, demangledName integer, gridX integer, gridY integer, gridZ integer,
    blockX integer, blockY integer, blockZ integer);
create table CUPTI_ACTIVITY_KIND_MEMCPY (start integer, end integer, deviceId integer, streamId integer,
    correlationId integer, copyKind integer, bytes integer);
create table CUPTI_ACTIVITY_KIND_RUNTIME (start integer, end integer, globalTid integer, correlationId integer, nameId integer);
create table NVTX_EVENTS (start integer, end integer, globalTid integer, text text, textId integer);
insert into StringIds values (1, 'ampere_sgemm_128x64_tn'), (2, 'cudaLaunchKernel_v7000');
insert into TARGET_INFO_GPU values (0, 'NVIDIA A100-SXM4-40GB');
insert into CUPTI_ACTIVITY_KIND_KERNEL values (1000, 3000, 0, 7, 11, 1, 8, 4, 1, 128, 1, 1), (4000, 6000, 0, 7, 12, 1, 8, 4, 1, 128, 1, 1);
insert into CUPTI_ACTIVITY_KIND_MEMCPY values (500, 900, 0, 7, 10, 1, 4096);
insert into CUPTI_ACTIVITY_KIND_RUNTIME values (100, 200, 77, 11, 2), (300, 400, 77, 12, 2);
insert into NVTX_EVENTS values (50, 450, 77, 'step', null);
"""


def test_nsys_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.executescript(_TABLES)
        base.commit()
    events = read_trace(path)
    assert detect(path) == "nsys-sqlite"
    assert events.device == "NVIDIA A100-SXM4-40GB"
    kernels = events.is_a(Category.KERNEL)
    assert events.duration_s[kernels].tolist() == pytest.approx([2e-6, 2e-6])
    assert events.correlation[kernels].tolist() == [11, 12]
    assert float(events.nbytes[events.is_a(Category.MEMCPY)][0]) == 4096


def test_nsys_sqlite_without_work(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute("create table other (x integer)")
        base.commit()
    with pytest.raises(InputError, match="no GPU work"):
        read_trace(path)


def test_nsys_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,Bytes (MB),Throughput (MBps),Device,Strm,Name\n"
        '100,200,5,8,1,1,128,1,1,32,,,NVIDIA A100 (0),7,"void gemm<float, 4>(int)"\n'
        "400,50,6,,,,,,,,4.000,80000,NVIDIA A100 (0),7,[CUDA memcpy HtoD]\n"
        "oops,50,6,,,,,,,,,,NVIDIA A100 (0),7,kernel\n"
    )
    events = read_trace(path)
    assert detect(path) == "nsys-csv"
    assert (len(events), events.skipped) == (2, 1)
    assert events.duration_s.tolist() == pytest.approx([2e-7, 5e-8])
    assert events.nbytes.tolist() == [0.0, 4e6]


def test_plain_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "name,start_us,duration_us,stream,category,bytes,rank\ngemm,10,5,compute,kernel,0,2\ncopy,20,1,copy,memcpy,64,2\n"
    )
    events = read_trace(path)
    assert events.names == ("gemm", "copy")
    assert events.duration_s.tolist() == pytest.approx([5e-6, 1e-6])
    assert events.rank == 2
    assert len(set(events.stream.tolist())) == 2


def test_plain_csv_without_start(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,duration_ms\na,1\nb,2\nc,x\n")
    events = read_trace(path)
    assert events.start_s.tolist() == pytest.approx([0, 1e-3])
    assert events.skipped == 1
