"""What is measured by the benchmarks that share a timeline: depths, tokens of a prefill, tokens of a decode."""

DEPTHS = (256, 2048)
PREFILL, DECODE = (512,), (32,)
