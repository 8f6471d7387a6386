#!/usr/bin/env bash
# A session with the planner's API over TLS, with curl alone: what devices do, a plan, and how far it is.
#
#     examples/session.sh HOST:PORT TOKEN_FILE CERTIFICATE MODEL
#
# CERTIFICATE is the planner's own, without its key. On the planner's machine:
#     openssl x509 -in /var/lib/stageloom/api.pem -out planner.pem
set -euo pipefail
[ $# -eq 4 ] || { sed -n 's/^# \{0,1\}//p' "$0" >&2; exit 2; }
address=$1 token_file=$2 certificate=$3 model=$4
planner=https://stageloom-planner/v1

# The certificate holds for the name stageloom-planner, wherever the planner is. What authenticates is the part
# of the token before its dot; from a file, so that no list of processes shows it.
api() {
    curl --silent --show-error --fail-with-body --cacert "$certificate" \
        --connect-to "stageloom-planner:443:$address" \
        --header @<(printf 'Authorization: Bearer %s' "$(cut -d. -f1 "$token_file")") "$@"
}

echo "devices:"
api "$planner/devices?limit=16" | jq -r '.items[] | "  \(.device)  online: \(.online)  \(.report.state)"'

# What takes long is a job. Sent again with the same key, after a broken connection say, it begins no second one.
key=$(cat /proc/sys/kernel/random/uuid)
request=$(jq -n --arg model "$model" '{models: [{model: $model}], scheduler: "ios", budget_s: 10}')
for attempt in 1 2; do
    job=$(api --header "Idempotency-Key: $key" --data "$request" "$planner/plans" | jq -r .job)
    echo "request $attempt is job $job"
done

# Its events come as they happen; the last one is `end`.
api --no-buffer "$planner/jobs/$job/events" | sed -n 's/^data: //p' | jq -r '"  \(.state)  \(.progress.text)"'
api "$planner/jobs/$job" | jq -r '"plan \(.result.plan.plan) by \(.result.plan.scheduler)"'

# A mistake is a problem (RFC 9457) that names cause and remedy; curl ends with 22.
api "$planner/plans/no-such-plan" | jq -r '"\(.status): \(.detail); \(.remedy)"' || true
