"""What a request asks of a model that pools."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_core.errors import TaskError, UserError
from lmi_core.models.pooling import PoolingSpec
from lmi_core.models.pooling_head import PoolingHead
from lmi_core.settings.field_checks import check_fields
from lmi_core.text.framed_text import FramedText, Truncate
from lmi_core.weights.formats import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt is read and what becomes of its vector."""

    text_pair: str | None = None
    """The second text of a pair that is scored; the prompt is the first."""
    prompt_name: str | None = None
    """Of the model's own prompts, the one that is put before the text; None: its default."""
    truncate: Truncate = ""
    """Where an input that is too long loses tokens, special ones excepted; "": it is refused."""
    dimensions: int | None = None
    """Leading elements of the vector that are kept, before it is normalised; None: all."""
    normalize: bool | None = None
    """To length 1; None: as the model is configured."""
    raw_score: bool = False
    """The classifier's own output instead of its sigmoid."""

    def result(self, head: PoolingHead, pooled: FloatArray) -> FloatArray:
        """What the request gets of its pooled hidden state [hidden]: a vector, or one score."""
        spec = head.spec
        if spec.task == "rerank":
            return head.score(pooled, raw=self.raw_score)
        normalize = spec.normalizes if self.normalize is None else self.normalize
        return head.embedding(pooled, self.dimensions, normalize=normalize)

    def check(self, head: PoolingHead) -> None:
        """Raise UserError for what a model with ``head`` can't give, and for other types."""
        check_fields(self)
        spec, size = head.spec, head.size
        if spec.task == "rerank":
            if self.text_pair is None:
                raise TaskError(
                    "this model scores pairs of texts; it has no embeddings: use /rerank or "
                    "/v1/rerank",
                    field="prompt",
                )
        elif self.text_pair is not None:
            raise TaskError(
                "this model embeds texts; it doesn't score pairs: use /embed or /v1/embeddings",
                field="query",
            )
        if self.dimensions is not None and not 1 <= self.dimensions <= size:
            raise UserError(
                f"dimensions is {self.dimensions}; this model's embeddings have {size}, of which "
                f"1 to {size} can be asked for",
                field="dimensions",
            )
        name = self.prompt_name
        if name is not None and name not in spec.prompts:
            known = ", ".join(map(repr, spec.prompts)) or "none"
            raise UserError(
                f"prompt_name is {name[:80]!r}; this model's prompts are: {known}",
                field="prompt_name",
            )


_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""What Qwen3-Reranker was trained to see around a pair (its model card)."""
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def framed_text(spec: PoolingSpec, text: str, params: PoolingParams) -> FramedText:
    """What is tokenized of a request: its text behind the model's prompt, or its pair, for a model
    that answers yes or no within the question."""
    if spec.answers is not None:
        pair = f"<Instruct>: {_INSTRUCTION}\n<Query>: {text}\n<Document>: {params.text_pair}"
        return FramedText(pair, frame=_JUDGE)
    name = params.prompt_name or spec.default_prompt
    return FramedText(("" if name is None else spec.prompts[name]) + text, params.text_pair)
