"""The allocator against a plain model of bytes, over many random lives."""

from property.machine import AllocatorMachine

TestTheAllocatorKeepsToTheModel = AllocatorMachine.TestCase
