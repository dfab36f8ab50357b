#!/usr/bin/env bash
# Serve a shape with random weights through one engine core and N frontends on one port, and load it with bench_serving,
# with bench_constrained if CONSTRAINED=1, or with side_by_side if SIDE_BY_SIDE=1.
#   benchmarks/serve_shape.sh SHAPE_FOLDER FRONTENDS NAME [flags of that benchmark ...]
# Results go to benchmarks/results/NAME.json; SERVE_FLAGS are added to `tandem serve`. Needs a CUDA device and the extras
# `engine`, `cuda`. The kernel spreads the connections over the frontends, one a stream, so few streams may share one.
set -euo pipefail
shape=$1 frontends=$2 name=$3
shift 3
work=$(mktemp -d)
chmod 700 "$work"
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$work"' EXIT
tandem=(python3 -c 'import sys; from tandem.frontend.cli.main import main; sys.exit(main())')

python3 -m benchmarks.shapes.make_folder "$shape" "$work/model"
started=$(date +%s%N)
"${tandem[@]}" serve --model "$work/model" --load-format dummy --device cuda --max-len 4096 --port 8400 --ops-port 8499 \
    --frontends "$frontends" --max-concurrent 4096 ${SERVE_FLAGS:-} &
url=http://127.0.0.1:8400
until curl -sf "$url/health/ready" >/dev/null; do
    kill -0 $! 2>/dev/null || { echo "serve_shape.sh: tandem serve ended before it was ready; see above" >&2; exit 1; }
    sleep 0.05
done
echo "ready after $((($(date +%s%N) - started) / 1000000)) ms"
bench=(benchmarks.bench_serving --token-ids)
if [[ -n ${CONSTRAINED:-} ]]; then
    bench=(benchmarks.bench_constrained --model-dir "$work/model")
elif [[ -n ${SIDE_BY_SIDE:-} ]]; then
    bench=(benchmarks.side_by_side --shape "$(basename "$shape")" --metrics http://127.0.0.1:8499/metrics)
fi
python3 -m "${bench[@]}" --url "$url" --model model --save "$name" "$@"
curl -s http://127.0.0.1:8499/metrics | grep -E '^tandem_(gpu|engine_stage|engine_steps)'
