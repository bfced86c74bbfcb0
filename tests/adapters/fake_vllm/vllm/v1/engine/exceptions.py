"""What generate() raises when the engine fails."""


class EngineGenerateError(Exception):
    pass


class EngineDeadError(Exception):
    pass
