#!/usr/bin/env bash
# Build the CPU image, train on the two hosts of compose.yaml, and check that they trained together.
#
#   docker/try.sh [--debootstrap]
#
# Options:
#   --debootstrap   create the base image with debootstrap (needs root), for a machine without access to
#                   an image registry; it trusts the certificates added to this machine
#
# Needs a running Docker engine and Compose 1 (docker-compose 1.29) or 2 (docker compose); without them it
# prints the reason and exits with 77. Containers, network and volumes belong to a separate project,
# hotrec-try, and are always removed at the end. The images hotrec:try and hotrec-try-base are kept, so that
# the next run only builds what has changed.
#
# Environment:
#   BASE_IMAGE      the base image; default that of the Dockerfile
#   BUILD_NETWORK   network of the build; host, if an index is at 127.0.0.1
#   PIP_INDEX_URL, TORCH_INDEX    package indexes (requirements/README.md); not stored in the image
#   COMPOSE         default "docker compose", else "docker-compose"
#   LIMIT_S         seconds that the hosts may take without the build; default 360
#
# The last line on stdout is the verdict.
set -euo pipefail

fail() { # exit code, text
    printf 'docker/try.sh: %s\n' "$2" >&2
    exit "$1"
}

say() {
    printf 'docker/try.sh: %s\n' "$*" >&2
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
project=hotrec-try limit_s=${LIMIT_S:-360} base=
export IMAGE=hotrec:try RUN=try

for word in "$@"; do
    case $word in
        -h | --help)
            sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --debootstrap) base=hotrec-try-base ;;
        *) fail 2 "option: expected one of those that --help lists, got '$word'." ;;
    esac
done
[[ $limit_s =~ ^[1-9][0-9]*$ ]] || fail 2 "LIMIT_S: expected seconds, got '$limit_s'."

answer=$(docker version --format '{{.Server.Version}}' 2>&1) ||
    fail 77 "Docker engine: expected an answer, got '${answer##*$'\n'}'. Start dockerd, or get access to its socket."
if [ -z "${COMPOSE:-}" ]; then
    COMPOSE="docker compose"
    $COMPOSE version >/dev/null 2>&1 || COMPOSE=docker-compose
fi
version=$($COMPOSE version --short 2>/dev/null) ||
    fail 77 "Compose: expected a version, got none from '$COMPOSE'. Install Compose 1 or 2, or name it in COMPOSE."

compose() {
    # shellcheck disable=SC2086 # COMPOSE is a command with its words.
    $COMPOSE -p "$project" -f docker/compose.yaml "$@"
}

folder=$(mktemp -d)
up='' is_up=''
clean_up() {
    [ -z "$up" ] || kill "$up" 2>/dev/null || true
    [ -z "$is_up" ] || compose down --volumes --timeout 10 >"$folder/down" 2>&1 || cat "$folder/down" >&2
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Service, state and exit code, one line per container.
states() {
    docker ps --all --quiet --filter "label=com.docker.compose.project=$project" | xargs -r docker inspect \
        --format '{{index .Config.Labels "com.docker.compose.service"}} {{.State.Status}} {{.State.ExitCode}}'
}

# The last lines, without the terminal codes that Compose 2 adds even without a terminal.
logs() { # lines, services
    compose logs --no-color --tail "$@" 2>&1 | sed 's/\x1b\[2K//' | cut -c -160 >&2
}

give_up() {
    logs 20 || true
    echo "failed: $*"
    exit 1
}

if [ -n "$base" ]; then
    { command -v debootstrap && [ "$(id -u)" = 0 ]; } >/dev/null ||
        fail 77 "--debootstrap: expected the program debootstrap and root, got user $(id -u). Install it, or name a BASE_IMAGE."
    export BASE_IMAGE=$base
    if ! docker image inspect "$base" >/dev/null 2>&1; then
        say "making $base"
        debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$folder/base" >&2
        for file in /usr/local/share/ca-certificates/*.crt; do
            [ ! -e "$file" ] || cp "$file" "$folder/base/usr/local/share/ca-certificates"
        done
        chroot "$folder/base" update-ca-certificates >&2
        tar -C "$folder/base" -c . | docker import - "$base" >/dev/null
        rm -rf "$folder/base"
    fi
fi

say "building $IMAGE with $COMPOSE $version, Docker $answer"
begin_s=$SECONDS
compose build prepare >&2
say "built in $((SECONDS - begin_s)) s; starting the hosts, at most $limit_s s"

! states | grep -q ' running ' ||
    fail 1 "project $project: expected no running containers, got $(states | xargs). Wait for the other try, or end it: $COMPOSE -p $project down."
is_up=yes
compose down --volumes >"$folder/down" 2>&1 # What a killed run left behind.
begin_s=$SECONDS said_s=$SECONDS
# It returns once the dataset and the plan exist and both trainers have started.
compose up -d --no-build >"$folder/up" 2>&1 &
up=$!
while
    is_starting=$(jobs -r)
    now=$(states)
    [ "$(grep -c '^trainer-. exited 0$' <<<"$now")" != 2 ]
do
    took_s=$((SECONDS - begin_s))
    ! grep -q ' exited [1-9]' <<<"$now" || give_up "expected exit code 0 of all services, got $(xargs <<<"$now")"
    [ -n "$is_starting" ] || grep -q ' running ' <<<"$now" ||
        give_up "expected both trainers to start, got $(xargs <<<"$now") and '$(tail -n 1 "$folder/up")'"
    ((took_s < limit_s)) || give_up "expected an end within $limit_s s, got $(xargs <<<"$now")"
    if ((SECONDS - said_s >= 10)); then
        say "$took_s s: $(awk '$2 == "running" { print $1 }' <<<"$now" | xargs)"
        said_s=$SECONDS
    fi
    sleep 2
done
took_s=$((SECONDS - begin_s))

logs 6 trainer-0 trainer-1
summary=$(compose run --rm --no-deps -T --entrypoint python prepare -c '
import json, pathlib, sys
run = pathlib.Path("runs/compose/try")
seen = {key: value for name in ("environment", "summary") for key, value in json.loads((run / f"{name}.json").read_text()).items()}
print("{num_hosts} hosts with {world_size} ranks in all, {num_steps} steps, AUC {auc:.4f}".format(**seen))
sys.exit((seen["num_hosts"], seen["world_size"], seen["finished"]) != (2, 4, True) or seen["auc"] <= 0.7)
' 2>"$folder/summary") || give_up "expected a finished run on 2 hosts with 4 ranks and an AUC above 0.7," \
    "got '$summary' $(tail -n 1 "$folder/summary")"
echo "passed: $summary, in $took_s s without the build (Compose $version)"
