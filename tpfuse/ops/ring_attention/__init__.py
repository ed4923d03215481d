"""Attention of sequences that are spread over ranks: schedules, implementations, and what each query may see."""
