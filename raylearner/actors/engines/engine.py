"""The engine protocol: what a rollout actor needs from whatever samples tokens."""

from collections.abc import Sequence
from typing import Protocol

from raylearner.types import Completion, PolicyVersion, Sampling, WeightReceipt, WeightUpdate


class Engine(Protocol):
    """Samples tokens under a policy version and takes new weights under running generations.

    `generate` never re-tokenises and returns log-probabilities of the distribution sampled from.
    `receive` raises `WeightTransferError` when a weight update fails or cannot be
    verified: the engine has then failed, and `close` is the only call still allowed.
    """

    @property
    def policy_version(self) -> PolicyVersion: ...

    async def start(self) -> None: ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion: ...

    async def receive(self, update: WeightUpdate) -> WeightReceipt: ...

    async def sleep(self) -> None:
        """Freezes running requests and frees what memory it can, until `receive` ends it."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self) -> None:
        """Ends every running request; their completions carry the stop reason `aborted`."""
        ...

    async def close(self) -> None: ...
