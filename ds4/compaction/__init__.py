"""Compaction: a span of the surface gives way to a checkpoint, as one transaction.

policy      the numbers and the triggers
prompts     every text that the model reads on the way
boundaries  where free text ends, at token and at text level
summary     the model writes the summary on the live context
ledger      what is kept mechanically beside it
tail        which nodes stay as they are
plan        what a compaction will do; whole.py and span.py make plans
"""
