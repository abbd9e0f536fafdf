from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.integration


def _run(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_dies_with_its_parent_even_when_that_is_killed() -> None:
    result = _run(
        """
        import os, signal, subprocess, sys
        child = subprocess.Popen(
            [sys.executable, "-c", (
                "import sys, time; from diptych.common.lifecycle import die_with_supervisor;"
                "die_with_supervisor(); print('armed', flush=True); sys.stdout.close(); time.sleep(60)"
            )],
            env={**os.environ, "DIPTYCH_PARENT_PID": str(os.getpid())},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        child.stdout.readline()
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    _wait_until_gone(int(result.stdout))


def _wait_until_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            loop = asyncio.new_event_loop()
            gone = loop.create_future()
            loop.add_reader(descriptor, gone.set_result, None)
            loop.run_until_complete(asyncio.wait_for(gone, 60))
            loop.remove_reader(descriptor)
            loop.close()
        finally:
            os.close(descriptor)


def test_a_child_whose_parent_is_already_gone_exits_at_once() -> None:
    result = _run(
        """
        from diptych.common.lifecycle import die_with_parent
        die_with_parent(parent_pid=1)
        print("still here")
        """
    )
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, "")


def test_a_process_that_exits_now_has_said_everything_and_cleans_up_nothing() -> None:
    code = """if True:
        import atexit
        from diptych.common.lifecycle import exit_now
        atexit.register(print, "clean-up")
        print("last words", end="")
        exit_now(3)"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (3, "last words")


def test_the_first_process_of_a_container_ends_at_sigterm_before_it_has_begun() -> None:
    code = """
    import os, signal
    os.getpid = lambda: 1
    from diptych.cli import main
    def load(name):
        print("imports", flush=True)
        signal.pause()
    main.importlib.import_module = load
    main.main(["bootstrap"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM, "by a handler: the kernel does not end such a process"


def test_a_process_ends_with_its_code_where_nothing_that_it_says_can_be_written() -> None:
    source = "import sys; from diptych.common.lifecycle import exit_now; print('x'); exit_now(3)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, stdout=full, stderr=full, env=env, timeout=60, check=False)
    assert done.returncode == 3
