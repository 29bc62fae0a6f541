# Completion of objkv for bash. Written by scripts/write_completion.py in a clone of the project: change it there.

_objkv_words() { # candidates after a command: $1 the command, $2 commands, options or arguments
    case "$1/$2" in
    objkv/commands) echo "access agent admission audit completion demo doctor exporter ls show size top match pin unpin warm prefetch diff verify sweep rebuild gpu-check bench" ;;
    objkv/options) echo "--version --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv access/options') echo "--role --tenant --kms-key-arn --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv agent/options') echo "--socket --idle-exit --replace --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv admission/options') echo "--for --namespace -n --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv admission/arguments') : ;;
    'objkv audit/options') echo "--namespace -n --html --tokenizer --show-text --roots --limit --price-gb-month --price-puts --price-gets --price-gpu-hour --since --deadline --workers --restart --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv completion/options') echo "--help" ;;
    'objkv completion/arguments') echo "bash zsh fish" ;;
    'objkv demo/options') echo "--small --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv doctor/options') echo "--all --model --tp --pp --dcp --kv-dtype --draft --kv-transfer-config --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv exporter/options') echo "--host --port --every --scan-every --namespaces-max --once --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv ls/options') echo "--namespace -n --prefixes --tree --limit --bulk --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv ls/arguments') : ;;
    'objkv show/options') echo "--namespace -n --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv show/arguments') : ;;
    'objkv size/options') echo "--model --list --layers --kv-heads --head-size --kv-dtype --tp --block-size --codec-ratio --rate --prompt-tokens --stored --ttl --used --sweep-every --price-gb-month --price-puts --price-gets --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv top/options') echo "--endpoint --endpoints --exporter --agent --no-index --every --once --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv match/options') echo "--tokens --text --text-file --tokenizer --namespace -n --cache-salt --lora-digest --explain --endpoint --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv pin/options') echo "--tokens --text --text-file --tokenizer --namespace -n --cache-salt --lora-digest --for --by --list --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv pin/arguments') : ;;
    'objkv unpin/options') echo "--namespace -n --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv unpin/arguments') : ;;
    'objkv warm/options') echo "--endpoint --model --promote --check --tokenizer --lora --engine-arg --served-model --api-key --namespace -n --concurrency --attempts --request-timeout --save-timeout --give-up-after --promote-max --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv warm/arguments') echo @files ;;
    'objkv prefetch/options') echo "--tokens --text --text-file --tokenizer --namespace -n --cache-salt --lora-digest --socket --no-wait --deadline --priority --prefetch-max --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv diff/options') echo "--bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv diff/arguments') echo @files ;;
    'objkv verify/options') echo "--namespace -n --sample --all --quarantine --apply --force --seed --deadline --memory --workers --restart --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv sweep/options') echo "--apply --only --namespace -n --grace --strangers --force --limit --workers --restart --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv rebuild/options') echo "--namespace -n --apply --workers --restart --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv gpu-check/options') echo "--model --random --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    'objkv bench/options') echo "--quick --bulk-url --index-url --config --output -o --json --no-color --debug --help" ;;
    esac
}

_objkv_value() { # candidates of an option: $1 the command, $2 the option; false for a flag
    case "$1 $2" in
    'objkv --bulk-url'|'objkv --index-url'|'objkv access --tenant'|'objkv access --kms-key-arn'|'objkv access --bulk-url'|'objkv access --index-url'|'objkv agent --idle-exit'|'objkv agent --bulk-url'|'objkv agent --index-url'|'objkv admission --for'|'objkv admission --namespace'|'objkv admission -n'|'objkv admission --bulk-url'|'objkv admission --index-url'|'objkv audit --namespace'|'objkv audit -n'|'objkv audit --roots'|'objkv audit --limit'|'objkv audit --price-gb-month'|'objkv audit --price-puts'|'objkv audit --price-gets'|'objkv audit --price-gpu-hour'|'objkv audit --deadline'|'objkv audit --workers'|'objkv audit --bulk-url'|'objkv audit --index-url'|'objkv demo --bulk-url'|'objkv demo --index-url'|'objkv doctor --tp'|'objkv doctor --pp'|'objkv doctor --dcp'|'objkv doctor --draft'|'objkv doctor --kv-transfer-config'|'objkv doctor --bulk-url'|'objkv doctor --index-url'|'objkv exporter --host'|'objkv exporter --port'|'objkv exporter --every'|'objkv exporter --scan-every'|'objkv exporter --namespaces-max'|'objkv exporter --bulk-url'|'objkv exporter --index-url'|'objkv ls --namespace'|'objkv ls -n'|'objkv ls --limit'|'objkv ls --bulk-url'|'objkv ls --index-url'|'objkv show --namespace'|'objkv show -n'|'objkv show --bulk-url'|'objkv show --index-url'|'objkv size --model'|'objkv size --layers'|'objkv size --kv-heads'|'objkv size --head-size'|'objkv size --tp'|'objkv size --block-size'|'objkv size --codec-ratio'|'objkv size --rate'|'objkv size --prompt-tokens'|'objkv size --stored'|'objkv size --ttl'|'objkv size --used'|'objkv size --sweep-every'|'objkv size --price-gb-month'|'objkv size --price-puts'|'objkv size --price-gets'|'objkv size --bulk-url'|'objkv size --index-url'|'objkv top --endpoint'|'objkv top --exporter'|'objkv top --every'|'objkv top --bulk-url'|'objkv top --index-url'|'objkv match --text'|'objkv match --namespace'|'objkv match -n'|'objkv match --cache-salt'|'objkv match --lora-digest'|'objkv match --endpoint'|'objkv match --bulk-url'|'objkv match --index-url'|'objkv pin --text'|'objkv pin --namespace'|'objkv pin -n'|'objkv pin --cache-salt'|'objkv pin --lora-digest'|'objkv pin --for'|'objkv pin --by'|'objkv pin --bulk-url'|'objkv pin --index-url'|'objkv unpin --namespace'|'objkv unpin -n'|'objkv unpin --bulk-url'|'objkv unpin --index-url'|'objkv warm --endpoint'|'objkv warm --model'|'objkv warm --lora'|'objkv warm --engine-arg'|'objkv warm --served-model'|'objkv warm --api-key'|'objkv warm --namespace'|'objkv warm -n'|'objkv warm --concurrency'|'objkv warm --attempts'|'objkv warm --request-timeout'|'objkv warm --save-timeout'|'objkv warm --give-up-after'|'objkv warm --promote-max'|'objkv warm --bulk-url'|'objkv warm --index-url'|'objkv prefetch --text'|'objkv prefetch --namespace'|'objkv prefetch -n'|'objkv prefetch --cache-salt'|'objkv prefetch --lora-digest'|'objkv prefetch --deadline'|'objkv prefetch --priority'|'objkv prefetch --prefetch-max'|'objkv prefetch --bulk-url'|'objkv prefetch --index-url'|'objkv diff --bulk-url'|'objkv diff --index-url'|'objkv verify --namespace'|'objkv verify -n'|'objkv verify --sample'|'objkv verify --seed'|'objkv verify --deadline'|'objkv verify --memory'|'objkv verify --workers'|'objkv verify --bulk-url'|'objkv verify --index-url'|'objkv sweep --namespace'|'objkv sweep -n'|'objkv sweep --grace'|'objkv sweep --limit'|'objkv sweep --workers'|'objkv sweep --bulk-url'|'objkv sweep --index-url'|'objkv rebuild --namespace'|'objkv rebuild -n'|'objkv rebuild --workers'|'objkv rebuild --bulk-url'|'objkv rebuild --index-url'|'objkv gpu-check --model'|'objkv gpu-check --bulk-url'|'objkv gpu-check --index-url'|'objkv bench --bulk-url'|'objkv bench --index-url') : ;;
    'objkv --config'|'objkv access --config'|'objkv agent --socket'|'objkv agent --config'|'objkv admission --config'|'objkv audit --html'|'objkv audit --tokenizer'|'objkv audit --since'|'objkv audit --config'|'objkv demo --config'|'objkv doctor --config'|'objkv exporter --config'|'objkv ls --config'|'objkv show --config'|'objkv size --config'|'objkv top --endpoints'|'objkv top --agent'|'objkv top --config'|'objkv match --tokens'|'objkv match --text-file'|'objkv match --tokenizer'|'objkv match --config'|'objkv pin --tokens'|'objkv pin --text-file'|'objkv pin --tokenizer'|'objkv pin --config'|'objkv unpin --config'|'objkv warm --tokenizer'|'objkv warm --config'|'objkv prefetch --tokens'|'objkv prefetch --text-file'|'objkv prefetch --tokenizer'|'objkv prefetch --socket'|'objkv prefetch --config'|'objkv diff --config'|'objkv verify --config'|'objkv sweep --config'|'objkv rebuild --config'|'objkv gpu-check --config'|'objkv bench --config') echo @files ;;
    'objkv --output'|'objkv -o'|'objkv access --output'|'objkv access -o'|'objkv agent --output'|'objkv agent -o'|'objkv admission --output'|'objkv admission -o'|'objkv audit --output'|'objkv audit -o'|'objkv demo --output'|'objkv demo -o'|'objkv doctor --output'|'objkv doctor -o'|'objkv exporter --output'|'objkv exporter -o'|'objkv ls --output'|'objkv ls -o'|'objkv show --output'|'objkv show -o'|'objkv size --output'|'objkv size -o'|'objkv top --output'|'objkv top -o'|'objkv match --output'|'objkv match -o'|'objkv pin --output'|'objkv pin -o'|'objkv unpin --output'|'objkv unpin -o'|'objkv warm --output'|'objkv warm -o'|'objkv prefetch --output'|'objkv prefetch -o'|'objkv diff --output'|'objkv diff -o'|'objkv verify --output'|'objkv verify -o'|'objkv sweep --output'|'objkv sweep -o'|'objkv rebuild --output'|'objkv rebuild -o'|'objkv gpu-check --output'|'objkv gpu-check -o'|'objkv bench --output'|'objkv bench -o') echo "table json wide" ;;
    'objkv access --role') echo "reader writer sweeper" ;;
    'objkv doctor --model') echo @folders ;;
    'objkv doctor --kv-dtype'|'objkv size --kv-dtype') echo "auto bfloat16 float16 float32 fp8 fp8_e4m3 fp8_e5m2" ;;
    'objkv sweep --only') echo "orphan ghost expired over_quota old_epoch stranger temporary quarantined" ;;
    *) return 1 ;;
    esac
}

_objkv_reply() { # $1 the candidates, or @files or @folders; $2 the beginning; $3 goes before each
    local line
    COMPREPLY=()
    case "$1" in
    @files) compopt -o filenames 2>/dev/null; set -- "$(compgen -f -- "$2")" "$3" ;;
    @folders) compopt -o filenames 2>/dev/null; set -- "$(compgen -d -- "$2")" "$3" ;;
    *) set -- "$(compgen -W "$1" -- "$2")" "$3" ;;
    esac
    while IFS= read -r line; do
        [[ -z $line ]] || COMPREPLY+=("$2$line")
    done <<<"$1"
}

_objkv_completion() {
    local current=${COMP_WORDS[COMP_CWORD]} before="" path=objkv option="" dashes="" word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        [[ $word != -- ]] || dashes=yes
        case "$word ${COMP_WORDS[i - 1]}" in # bash splits values at = and :
        -* | [=:]\ * | *\ [=:]) continue ;;
        esac
        [[ -z $(_objkv_words "$path" commands) ]] ||
            _objkv_value "$path" "${COMP_WORDS[i - 1]}" >/dev/null || path="$path $word"
    done
    word=${COMP_WORDS[COMP_CWORD - 1]}
    if [[ -z $dashes ]]; then
        if [[ $current == "=" ]]; then # bash splits --option=value at the sign
            option=$word current=""
        elif [[ $word == "=" ]]; then
            option=${COMP_WORDS[COMP_CWORD - 2]}
        elif [[ $current == --*=* ]]; then
            option=${current%%=*} before=${current%%=*}= current=${current#*=}
        else
            option=$word
        fi
        if word=$(_objkv_value "$path" "$option"); then
            _objkv_reply "$word" "$current" "$before"
            return
        fi
        if [[ -n $before || $option != "${COMP_WORDS[COMP_CWORD - 1]}" ]]; then
            COMPREPLY=() # a flag takes no value
            return
        fi
    fi
    if [[ -z $dashes && $current == -* ]]; then
        _objkv_reply "$(_objkv_words "$path" options)" "$current" ""
    else
        word=$(_objkv_words "$path" commands)$(_objkv_words "$path" arguments)
        _objkv_reply "$word" "$current" ""
    fi
}

complete -F _objkv_completion objkv
