# syntax=docker/dockerfile:1
# The image of every pod of server/deploy/ray.yaml, from the repository's root, after `make wheels PYTHONS=python3.12`:
#
#     docker build -f server/deploy/ray.Dockerfile -t lmi-ray .
FROM rayproject/ray:2.60.0-py312-cpu
COPY dist/*.whl /tmp/wheels/
RUN wheel=$(echo /tmp/wheels/*.whl) && pip install --no-cache-dir "${wheel}[hub,structured,ray]"
