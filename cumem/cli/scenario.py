"""The demo itself: build, generate, sleep, let someone else use the room, wake up, and generate the same again.

Imports torch; loaded by the demo only.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor

from cumem.allocator import Allocator
from cumem.cli.decoder import Decoder
from cumem.cli.decoding import Decoding
from cumem.cli.machine import describe_machine
from cumem.cli.presets import DemoPlan
from cumem.cli.result import Continuation, DemoResult, Snapshot
from cumem.cli.stages import Stages
from cumem.cli.timeline import Timeline
from cumem.cli.units import format_bytes
from cumem.reports import AdoptReport, SleepReport, WakeReport

__all__ = ["GUEST", "KV_CACHE", "WEIGHTS", "run_scenario"]

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
GUEST = "guest"


def run_scenario(allocator: Allocator, plan: DemoPlan, console: Console) -> DemoResult:
    """Runs the demo on an allocator of its own, showing each stage on `console`.

    Blocks for seconds to a minute by the plan's size. Raises what the allocator raises; a result that differs is no
    error but `DemoResult.passed` being false.
    """
    with Stages(console, Timeline(allocator.stats)) as stages:
        return _Scenario(allocator, plan, stages).run()


class _Scenario:
    """One run; the methods stand in the order of its story."""

    def __init__(self, allocator: Allocator, plan: DemoPlan, stages: Stages) -> None:
        self.allocator = allocator
        self.plan = plan
        self.stage = stages.stage
        self.timeline = stages.timeline
        self.device: torch.device = allocator.torch_device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.snapshots: list[Snapshot] = []

    def run(self) -> DemoResult:
        decoder, adopt = self.build_weights()
        cache = self.build_cache()
        decoding = Decoding(decoder, cache)
        prompt, before, reference = self.generate(decoding)
        reference_logits = decoding.logits
        addresses = _addresses(decoder, cache)
        self.snapshot("awake")
        sleep = self.sleep()
        self.snapshot("asleep")
        self.use_the_room(sleep.freed_bytes)
        wake_weights = self.wake("wake weights", WEIGHTS)
        self.snapshot("weights awake")
        wake_cache = self.wake("wake cache", KV_CACHE)
        self.snapshot("awake again")
        after_wake = self.generate_again(decoding, prompt, before)
        now = _addresses(decoder, cache)
        return DemoResult(
            driver=self.allocator.driver_name,
            machine=describe_machine(self.device),
            plan=self.plan,
            dtype=str(self.dtype).removeprefix("torch."),
            parameters=self.plan.decoder.parameters,
            weight_bytes=sum(parameter.nbytes for parameter in decoder.parameters()),
            cache_bytes=cache.nbytes,
            guest_bytes=sleep.freed_bytes,
            adopt=adopt,
            sleep=sleep,
            wake_weights=wake_weights,
            wake_cache=wake_cache,
            snapshots=self.snapshots,
            addresses=len(now),
            addresses_equal=now == addresses,
            continuation=Continuation(
                prompt=prompt.tolist(),
                before=before.tolist(),
                reference=reference.tolist(),
                after_wake=after_wake.tolist(),
                logits_equal=_same_bits(reference_logits, decoding.logits),
            ),
            phases=self.timeline.phases,
            samples=self.timeline.samples,
        )

    def build_weights(self) -> tuple[Decoder, AdoptReport]:
        size = format_bytes(self.plan.decoder.parameters * self.dtype.itemsize)
        with self.stage("build", f"Build {size} of weights in native memory"):
            decoder = Decoder(self.plan.decoder, seed=self.plan.seed, device=self.device, dtype=self.dtype)
            self.finish()
        with self.stage("adopt", "Adopt them: the same tensors, now in memory that can sleep", watch=True):
            report = self.allocator.adopt(decoder, tag=WEIGHTS)
        return decoder, report

    def build_cache(self) -> Tensor:
        shape = self.plan.decoder.cache_shape(self.plan.batch, self.plan.context)
        with self.stage("cache", "Make the KV cache, whose contents need not survive", watch=True):
            self.allocator.set_policy(KV_CACHE, "discard", wake="zero")
            cache = self.allocator.empty(*shape, dtype=self.dtype, tag=KV_CACHE, backend="discard")
            return cache.zero_()

    def generate(self, decoding: Decoding) -> tuple[Tensor, Tensor, Tensor]:
        """Prompt, tokens before the sleep, and the tokens that would come next without one."""
        plan = self.plan
        generator = torch.Generator().manual_seed(plan.seed)
        shape = (plan.batch, plan.prompt_tokens)
        prompt = torch.randint(plan.decoder.vocab, shape, generator=generator).to(self.device)
        many = f"{plan.new_tokens} tokens for {plan.batch} sequences"
        with self.stage("generate", f"Prefill, then generate {many}", steps=plan.new_tokens) as advance:
            decoding.prefill(prompt)
            before = decoding.generate(plan.new_tokens, advance)
            self.finish()
        with self.stage("reference", "Generate as many more: the reference", steps=plan.new_tokens) as advance:
            reference = decoding.generate(plan.new_tokens, advance)
            self.finish()
        return prompt, before, reference

    def sleep(self) -> SleepReport:
        with self.stage("sleep", "Sleep: save the weights, drop the cache, give all pages back", watch=True):
            return self.allocator.sleep()

    def use_the_room(self, size_bytes: int) -> None:
        """Takes all the memory that the sleep gave back and writes over it: whoever restores must really restore."""
        with self.stage("guest", f"Someone else fills the {format_bytes(size_bytes)} and leaves", watch=True):
            guest = self.allocator.empty(size_bytes, dtype=torch.uint8, tag=GUEST, backend="discard")
            self.timeline.sample()
            guest.fill_(0xA5)
            self.finish()
            self.timeline.sample()
            del guest

    def wake(self, name: str, tag: str) -> WakeReport:
        with self.stage(name, f"Wake up {tag}", watch=True):
            return self.allocator.wake_up(tags=[tag])

    def generate_again(self, decoding: Decoding, prompt: Tensor, before: Tensor) -> Tensor:
        count = self.plan.new_tokens
        with self.stage("refill cache", "Refill the cache: prefill, replay the tokens so far", steps=count) as advance:
            decoding.prefill(prompt)
            decoding.replay(before, advance)
            self.finish()
        with self.stage("generate again", "Generate again what the reference holds", steps=count) as advance:
            tokens = decoding.generate(count, advance)
            self.finish()
        return tokens

    def snapshot(self, moment: str) -> None:
        """Notes what is held now; torch's idle cache goes back first, so that the driver's figure means something."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        free_bytes, total_bytes = self.allocator.driver_memory()
        self.snapshots.append(Snapshot(moment, self.allocator.stats(), free_bytes, total_bytes))

    def finish(self) -> None:
        """Waits for the device, so that a stage's time is its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _addresses(decoder: Decoder, cache: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in (*decoder.parameters(), *decoder.buffers(), cache)]


def _same_bits(reference: Tensor | None, after: Tensor | None) -> bool:
    return reference is not None and after is not None and torch.equal(reference, after)
