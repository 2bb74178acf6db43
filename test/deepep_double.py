"""A double of DeepEP's low-latency buffer that moves tokens between processes over gloo, on CPU tensors.

It stands for ``deep_ep.Buffer`` below the engine's own dispatcher: the same two methods with the same arguments, results in the
same layout, and the data only there once the receiving hook has been called. It makes no claim about speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

GROUP_SIZE = 128
_FP8_MAX = 448.0
# Token and choice of a row, two int32 before its payload; the expert stands in front of them.
_HEADER = 3


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 ``[T, K]`` and float32 scales ``[T, K / 128]``, as the dispatch casts: the largest of a group becomes 448."""
    groups = x.float().unflatten(1, (-1, GROUP_SIZE))
    scales = groups.abs().amax(2).clamp_min(1e-4) / _FP8_MAX
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1), scales


@dataclass(frozen=True)
class Handle:
    """What a combine needs of its dispatch: for every packed row, in order, the rank it came from, its token and choice."""

    expert: torch.Tensor
    row: torch.Tensor
    header: torch.Tensor
    rows_by_rank: list[int]


class LowLatencyBufferDouble:
    """One rank's end of ``deep_ep.Buffer`` in low-latency mode.

    Args:
        group: a gloo group of all ranks that share the experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)

    def _exchange(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Bytes ``[rows, width]`` for every rank against those from every rank, in the order of ranks."""
        sent = torch.tensor([len(part) for part in rows])
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent, group=self.group)
        received = torch.empty((int(counts.sum()), rows[0].size(1)), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.cat(rows), counts.tolist(), sent.tolist(), group=self.group)
        return received, counts.tolist()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, Handle, None, Callable[[], None]]:
        """Send every token to each of its experts.

        Args:
            x: bfloat16 ``[T, K]``; T may differ between ranks and be 0.
            topk_idx: int64 ``[T, topk]``, experts of the whole model; -1 is none.

        Returns:
            fp8 ``[E, M, K]`` and float32 ``[E, M, K / 128]`` with strides ``(M * K / 128, 1, M)``, E local experts and
            M = cap x ranks; int32 ``[E]``, the rows received; the handle; no event; the hook after which they hold.

        Raises:
            RuntimeError: more tokens than the cap, or a form of dispatch that is not imitated.
        """
        if x.size(0) > num_max_dispatch_tokens_per_rank:
            raise RuntimeError(f"x has {x.size(0)} tokens, must be at most {num_max_dispatch_tokens_per_rank}")
        if not use_fp8 or round_scale or use_ue8m0 or async_finish or not return_recv_hook:
            raise RuntimeError("only fp8 with float32 scales and a receiving hook is imitated")
        local, (_, hidden) = num_experts // self.group_size, x.shape
        padded, groups = num_max_dispatch_tokens_per_rank * self.group_size, hidden // GROUP_SIZE
        payload, scales = quantize(x)
        rows = []
        for rank in range(self.group_size):
            token, choice = torch.where((topk_idx >= 0) & (topk_idx // local == rank))
            header = torch.stack([topk_idx[token, choice] % local, token, choice], dim=1).to(torch.int32)
            parts = (header, payload[token], scales[token])
            rows.append(torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1))
        received, rows_by_rank = self._exchange(rows)
        header, values, factors = received.split([4 * _HEADER, hidden, 4 * groups], dim=1)
        header = header.contiguous().view(torch.int32)
        expert = header[:, 0].long()
        # Rows of an expert stand one after another, whatever rank they come from.
        position = (torch.nn.functional.one_hot(expert, local).cumsum(0) - 1)[torch.arange(len(expert)), expert]

        # NaN in payload and scales until the hook, and in the padding for good: one read of it into a live row shows.
        packed = torch.full((local, padded, hidden), 0x7F, dtype=torch.uint8)
        packed_scales = torch.full((local, groups, padded), float("nan")).transpose(1, 2)
        count = torch.full((local,), -1, dtype=torch.int32)

        def hook() -> None:
            packed[expert, position] = values
            packed_scales[expert, position] = factors.contiguous().view(torch.float32)
            count.copy_(torch.bincount(expert, minlength=local))

        handle = Handle(expert, position, header[:, 1:], rows_by_rank)
        return (packed.view(torch.float8_e4m3fn), packed_scales), count, handle, None, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **unused: Any,
    ) -> tuple[torch.Tensor, None, Callable[[], None]]:
        """Send every row back to where its token came from, and add them up there with their weights, in float32.

        Args:
            x: bfloat16 ``[E, M, K]``, the experts' outputs; rows past those received are not read.
            topk_idx, topk_weights: ``[T, topk]`` of the tokens that this rank dispatched.

        Returns:
            bfloat16 ``[T, K]``; no event; the hook after which it holds.
        """
        parts = (handle.header, x[handle.expert, handle.row])
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        received, _ = self._exchange(list(rows.split(handle.rows_by_rank)))
        header, values = received.split([8, received.size(1) - 8], dim=1)
        token, choice = header.contiguous().view(torch.int32).long().unbind(1)
        combined = torch.full((len(topk_idx), x.size(2)), float("nan"), dtype=torch.bfloat16)

        def hook() -> None:
            weighted = values.contiguous().view(torch.bfloat16).float() * topk_weights[token, choice].float()[:, None]
            combined.copy_(torch.zeros(combined.shape).index_add_(0, token, weighted))

        return combined, None, hook
