"""`octablox bench gmm` as a program of this folder.

python -m benchmarks.gmm [--json FILE]
"""

from octablox.bench.gmm import main

if __name__ == "__main__":
    main()
