"""Sums of gradient buckets over data-parallel ranks, by every implementation, and the choice of one."""
