"""LMI and SageMaker: routes, bodies and answers."""
