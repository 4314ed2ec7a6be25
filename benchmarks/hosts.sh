# Hosts made of network namespaces; to be sourced by the scripts beside it.
#
# Two hosts are joined by a veth pair. More hang on a bridge, which has a namespace of its own, by a
# veth pair each. Every end of every pair is shaped to the rate by tbf, so each host sends and
# receives at no more than that. Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc.
#
#   make_hosts RATE NUMBER   namespaces host_names[0..NUMBER-1], interface veth0, 10.77.0.1 and up;
#                            its status tells whether it could; says why not on stderr
#   remove_hosts             ends what run_on_hosts has left, deletes the namespaces
#   run_on_hosts LOGS RANKS words ...
#                            torchrun with one node on each host, RANKS ranks on each. The first
#                            host's output is the caller's, the others' goes to LOGS/host-1 and so on
#   clean_up_at_end DIR      removes the hosts and DIR when the script ends, however it ends
#   find_python              prints the interpreter: PYTHON, else .venv, else python3
set -euo pipefail

# Unique names: runs side by side must not meet.
hosts_id="$$$((RANDOM % 1000))"
host_names=()
host_pids=()

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    echo "$PYTHON"
  elif [ -x .venv/bin/python ]; then
    echo .venv/bin/python
  else
    echo python3
  fi
}

shape() {
  tc -n "$1" qdisc add dev "$2" root tbf rate "$3" burst 256kb latency 50ms
}

make_host() {
  ip -n "$1" address add "10.77.0.$2/24" dev veth0 || return 1
  ip -n "$1" link set veth0 up || return 1
  ip -n "$1" link set lo up || return 1
  shape "$1" veth0 "$3" || return 1
}

make_hosts() {
  local rate=$1 number=$2 switch="hotrec-$hosts_id-switch" index name
  host_names=()
  for ((index = 0; index < number; index++)); do
    host_names+=("hotrec-$hosts_id-$index")
    ip netns add "hotrec-$hosts_id-$index" || return 1
  done
  # Each end is made inside its namespace, so the name is free in all of them.
  if [ "$number" -eq 2 ]; then
    ip link add veth0 netns "${host_names[0]}" type veth \
      peer name veth0 netns "${host_names[1]}" || return 1
  else
    ip netns add "$switch" || return 1
    ip -n "$switch" link add bridge0 type bridge || return 1
    ip -n "$switch" link set bridge0 up || return 1
    for ((index = 0; index < number; index++)); do
      ip link add veth0 netns "${host_names[$index]}" type veth \
        peer name "port$index" netns "$switch" || return 1
      ip -n "$switch" link set "port$index" master bridge0 || return 1
      ip -n "$switch" link set "port$index" up || return 1
      shape "$switch" "port$index" "$rate" || return 1
    done
  fi
  for ((index = 0; index < number; index++)); do
    make_host "${host_names[$index]}" "$((index + 1))" "$rate" || return 1
  done
}

end_hosts() {
  local pid
  for pid in "${host_pids[@]}"; do kill "$pid" 2> /dev/null || true; done
  host_pids=()
}

remove_hosts() {
  local name
  end_hosts
  # Deleting a namespace deletes its ends of the pairs, and with them the other ends.
  for name in "${host_names[@]}" "hotrec-$hosts_id-switch"; do
    ip netns del "$name" 2> /dev/null || true
  done
  host_names=()
}

clean_up_at_end() {
  hosts_scratch=$1
  trap 'remove_hosts; rm -rf "$hosts_scratch"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

# host_node NODE RANKS words ...
host_node() {
  local node=$1 ranks=$2
  shift 2
  exec ip netns exec "${host_names[$node]}" env \
    GLOO_SOCKET_IFNAME=veth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    "$(find_python)" -m torch.distributed.run --nnodes "${#host_names[@]}" --node-rank "$node" \
    --nproc-per-node "$ranks" --master-addr 10.77.0.1 --master-port 29500 "$@"
}

run_on_hosts() {
  local logs=$1 ranks=$2 status=0 node
  shift 2
  for ((node = 1; node < ${#host_names[@]}; node++)); do
    host_node "$node" "$ranks" "$@" > "$logs/host-$node" 2>&1 &
    host_pids+=("$!")
  done
  (host_node 0 "$ranks" "$@") || status=$?
  # Without the first host the others would wait for it.
  if [ "$status" -ne 0 ]; then
    local pid
    for pid in "${host_pids[@]}"; do kill "$pid" 2> /dev/null || true; done
  fi
  for node in "${!host_pids[@]}"; do wait "${host_pids[$node]}" || status=$?; done
  host_pids=()
  if [ "$status" -ne 0 ]; then
    for ((node = 1; node < ${#host_names[@]}; node++)); do
      echo "exit code $status; host $node said:" >&2
      tail -n 40 "$logs/host-$node" >&2
    done
  fi
  return "$status"
}
