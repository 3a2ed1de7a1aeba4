"""The least configuration that loads."""

MINIMAL = """\
model: {kind: tiny}
data: {train: {kind: calculator}}
environment: {kind: single_turn}
actors: {engine: {kind: vllm, max_model_tokens: 512}}
learner: {compute_dtype: float32}
"""
