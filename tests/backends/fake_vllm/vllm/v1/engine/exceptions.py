"""What generate() raises when the engine fails."""

from vllm.exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError):
    pass


class EngineDeadError(VLLMServerError):
    pass
