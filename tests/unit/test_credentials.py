"""Keys and passwords: refused in configurations, masked in texts, kept from checks of answers."""

import io
import logging
import os
import time
from pathlib import Path

import pytest
from minimal import QUICKSTART

from raylearner import credentials
from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.errors import ToolError
from raylearner.observability import logs
from raylearner.rewards.checked import Checker, CheckFailed, _read_reply

KEY = "0123456789abcdef-of-a-service"


@pytest.mark.parametrize(
    "text",
    [
        f"401 for key {KEY}",
        "connect to http://user:hunter2-hunter2@proxy.example:3128 failed",
        "headers {'Authorization': 'Bearer abcdef.123456-xyz'}",
        "GET https://api.example/v1?model=m&api_key=hunter2hunter2",
        "Incorrect API key provided: sk-abcdefghijklmnopqrstuvwx",
        "hf_abcdefghijklmnopqrstuvwxyz is not valid",
    ],
)
def test_credentials_are_masked_in_logs_and_recorded_errors(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", KEY)
    hidden = (KEY, "hunter2", "abcdef")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.VisibleFormatter("%(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed: %s", text)
    for written in (stream.getvalue(), ToolError(text).text):
        assert credentials.MASK in written
        assert not any(part in written for part in hidden)


@pytest.mark.parametrize(
    "text",
    [
        "rewards.functions: url: http://judge:8000/v1 answered status 500",
        "the token <think> is not in the vocabulary; key 'a' of tools://x",
        "a task-force of sk-learn users, hf_home, /root/.ray/auth_token",
        "step=3 loss=0.1 tokens_per_s=1e4 ?page=2",
    ],
)
def test_ordinary_texts_are_not_masked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token-of-a-mode")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/root/.ray/auth_token")
    monkeypatch.setenv("SHORT_KEY", "step")
    assert credentials.mask(text) == text
    assert credentials.find(text, os.environ) is None


def test_masking_takes_time_in_proportion_to_the_text() -> None:
    for part in ("://", "://a:", "Bearer ", "?key=", "sk-", "a" * 10, "://a:b", "Basic a"):
        started = time.perf_counter()
        credentials.mask(part * 20_000)
        assert time.perf_counter() - started < 2.0, part


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.system_prompt", f"your key is {KEY}"),
        ("cluster.address", "ray://user:hunter2@head:10001"),
        ("run.name", "sk-abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_a_configuration_with_a_credential_is_refused_without_showing_it(
    key: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", KEY)
    with pytest.raises(ConfigProblems) as refusal:
        load([QUICKSTART], [f"{key}={value}"], environment=os.environ)
    assert key in {problem.key for problem in refusal.value.problems}
    assert value not in str(refusal.value)


async def test_evaluated_answers_have_no_credentials_and_no_access_to_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reasoning-gym evaluates answers of this task as Python; the right ones here prove a refusal."""
    monkeypatch.setenv("SERVICE_API_KEY", KEY)
    monkeypatch.setenv("https_proxy", f"http://user:{KEY}@proxy:1")
    escaped = tmp_path / "escaped"
    right = ["A", "B", "C"]
    entry = {"answer": "ABC", "metadata": {}}
    hostile = [
        f"open({str(escaped)!r}, 'w')",
        f"__import__('os').open({str(escaped)!r}, 65, 511)",
        f"__import__('os').mkdir({str(escaped)!r})",
        f"__import__('subprocess').run(['touch', {str(escaped)!r}])",
        "__import__('os').fork()",
        f"__import__('os').kill({os.getpid()}, 0)",
        "__import__('socket').socket()",
        "__import__('ctypes').CDLL(None).unlink(b'/tmp/x') and 1/0",
    ]
    told = f"{right} if {KEY!r} not in str(__import__('os').environ) else ''"
    checker = Checker(library="reasoning_gym", num_processes=1, timeout_s=20.0)
    try:
        arguments = ("reasoning", "string_insertion", {}, entry)
        assert await checker.check(*arguments, told) == 0.1
        for answer in hostile:
            assert await checker.check(*arguments, f"{answer} and {right}") == 0.0, answer
        assert await checker.check(*arguments, f"__import__('os').getpid() and {right}") == 0.1
    finally:
        await checker.close()
    assert not escaped.exists()


@pytest.mark.parametrize(
    "line",
    [b"{", b"[" * 100_000, b"3", b'{"value": 7}', b'{"value": NaN}', b'{"value": "1"}', b"{}"],
)
def test_a_malformed_reply_is_a_failed_check(line: bytes) -> None:
    with pytest.raises(CheckFailed):
        _read_reply("reasoning", line)
